"""How the leaves of a tree and the tensors of other files correspond."""
