"""What the papers claim and draw: the product does not import it."""
