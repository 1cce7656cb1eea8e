"""Decoding: draft a tree, verify it in one forward of the target, keep what the target accepts.

Read engine.py first (`SpeculativeDecoder.generate`, the loop), then roles.py (who does what),
dynamic_tree.py (EAGLE-2's tree) and verify.py (which drafted tokens are accepted). runners.py runs
a cycle, eagerly or as CUDA graphs, and says what a captured cycle must not do.
"""
