"""Find damage, and mend it."""

from ostraka.integrity._repair import repair
from ostraka.integrity._repair_report import MendedFile, RepairReport
from ostraka.integrity._report import Note, Report
from ostraka.integrity._verify import verify

__all__ = ["MendedFile", "Note", "RepairReport", "Report", "repair", "verify"]
