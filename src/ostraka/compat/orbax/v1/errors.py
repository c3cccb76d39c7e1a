"""Errors of v1."""

from ostraka.compat.orbax._refuse import refuse

__getattr__ = refuse(__name__)


class InvalidLayoutError(ValueError, FileNotFoundError):
    """There is no checkpoint at a path."""


class StepAlreadyExistsError(FileExistsError):
    """A step is there already."""


class StepNotFoundError(FileNotFoundError):
    """A step is not there."""


class NoEntryError(KeyError):
    """A checkpointable does not fit what is asked for."""

    def __str__(self) -> str:
        return str(self.args[0])
