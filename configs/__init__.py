"""Recipes (YAML), their schema, and the reader."""
