"""Find damage, and mend it."""

from ostraka.integrity._repair import repair
from ostraka.integrity._repair_report import MendedFile, RepairReport
from ostraka.integrity._verify import Report, verify

__all__ = ["MendedFile", "RepairReport", "Report", "repair", "verify"]
