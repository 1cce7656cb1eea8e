"""Modules, weights and checkpoint formats: the target, the draft heads, and how they are stored."""
