"""Copy checkpoints from store to store."""

from ostraka.transfer._copy import CopyReport, copy

__all__ = ["CopyReport", "copy"]
