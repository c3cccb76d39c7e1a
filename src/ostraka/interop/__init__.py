"""Checkpoints made of others: merged, or converted to another format."""

from ostraka.interop._convert import ConvertReport, convert
from ostraka.interop._merge import MergeReport, merge

__all__ = ["ConvertReport", "MergeReport", "convert", "merge"]
