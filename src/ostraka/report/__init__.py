"""Runs, checkpoints, comparisons and plans as pages to look at. No JAX."""
