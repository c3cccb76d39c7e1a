"""Find damage in checkpoints, and repair it."""

from ostraka.integrity._report import MendedFile, Note, RepairReport, VerifyReport
from ostraka.integrity._verify import verify
from ostraka.integrity.repair.repair import repair

__all__ = ["MendedFile", "Note", "RepairReport", "VerifyReport", "repair", "verify"]
