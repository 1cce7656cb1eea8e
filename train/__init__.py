"""Objectives, the training loop and its resume."""
