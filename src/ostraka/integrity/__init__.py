"""Find damage in checkpoints, and repair it."""

from ostraka.integrity._report import ANOTHER_COPY, Note, RepairedFile, RepairReport, VerifyReport
from ostraka.integrity._verify import verify
from ostraka.integrity.repair.repair import repair

__all__ = [
    "ANOTHER_COPY",
    "Note",
    "RepairReport",
    "RepairedFile",
    "VerifyReport",
    "repair",
    "verify",
]
