"""The tree that suits a head on this machine: record every draft once, replay any tree, price it, choose, measure."""
