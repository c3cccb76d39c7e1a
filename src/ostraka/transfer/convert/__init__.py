"""Merge checkpoints, and convert them to other formats."""

from ostraka.transfer._merge import MergeReport, merge
from ostraka.transfer.convert._convert import ConvertReport, convert

__all__ = ["ConvertReport", "MergeReport", "convert", "merge"]
