"""Judges what the papers claim and draws their pictures; the product does not import it."""
