"""Find damage."""

from ostraka.integrity._verify import Report, verify

__all__ = ["Report", "verify"]
