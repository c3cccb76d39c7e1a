"""Errors of v1."""


class InvalidLayoutError(ValueError, FileNotFoundError):
    """There is no checkpoint at a path."""


class StepAlreadyExistsError(FileExistsError):
    """A step exists already."""


class StepNotFoundError(FileNotFoundError):
    """A step does not exist."""


class NoEntryError(KeyError):
    """A checkpointable can't be loaded as asked for."""

    def __str__(self) -> str:
        return str(self.args[0])
