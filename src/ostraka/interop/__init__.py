"""Checkpoints made of others: merged."""

from ostraka.interop._merge import MergeReport, merge

__all__ = ["MergeReport", "merge"]
