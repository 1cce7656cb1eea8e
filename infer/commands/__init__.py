"""The commands of infer/main.py: each adds its options and composes its stage from recipe, run and head."""
