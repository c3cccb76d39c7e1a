"""Boxes, specs, shard files and plans as data. Pure: no I/O, no JAX."""
