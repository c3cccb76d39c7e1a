"""How Orbax commits: its classes are accepted as `temporary_path_class`, and change nothing."""

from ostraka.compat.orbax._refuse import refuse

__getattr__ = refuse(__name__)


class AtomicRenameTemporaryPath:
    """A checkpoint of ours appears in one atomic event, wherever it is."""


class CommitFileTemporaryPath:
    """A checkpoint of ours appears in one atomic event, wherever it is."""
