"""Copy checkpoints from store to store."""

from ostraka.transfer._checkpoint import CopyPlace, copy_shards, find_lost
from ostraka.transfer._copy import CopyReport, copy
from ostraka.transfer._files import Tally

__all__ = ["CopyPlace", "CopyReport", "Tally", "copy", "copy_shards", "find_lost"]
