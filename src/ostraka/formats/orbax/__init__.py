"""Checkpoints that Orbax wrote."""
