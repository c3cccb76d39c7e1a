"""Find damage in checkpoints, and repair it."""

from ostraka.integrity._report import Note, Report
from ostraka.integrity._verify import verify
from ostraka.integrity.repair.repair import repair
from ostraka.integrity.repair.report import MendedFile, RepairReport

__all__ = ["MendedFile", "Note", "RepairReport", "Report", "repair", "verify"]
