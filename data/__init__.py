"""Text to tokens, loss mask and features."""
