"""The embedded corpus."""
