"""Published checkpoint formats."""
