"""Copy checkpoints from store to store."""

from ostraka.transfer._copy import CopyReport, copy
from ostraka.transfer._copy_ostraka import CopyPlace, copy_shards, find_lost

__all__ = ["CopyPlace", "CopyReport", "copy", "copy_shards", "find_lost"]
