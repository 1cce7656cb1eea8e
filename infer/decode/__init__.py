"""The decoding engine: draft a tree, verify it in one target forward, commit what was accepted."""
