"""Find damage."""

from ostraka.integrity._report import Note, Report
from ostraka.integrity._verify import verify

__all__ = ["Note", "Report", "verify"]
