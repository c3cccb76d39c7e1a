"""Find damage in checkpoints, and repair it."""

from ostraka.integrity._report import ANOTHER_COPY, MendedFile, Note, RepairReport, VerifyReport
from ostraka.integrity._verify import verify
from ostraka.integrity.repair.repair import repair

__all__ = [
    "ANOTHER_COPY",
    "MendedFile",
    "Note",
    "RepairReport",
    "VerifyReport",
    "repair",
    "verify",
]
