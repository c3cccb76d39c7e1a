"""Emergency checkpoints, which the drop-in does not have: programs that only import them run."""

from ostraka.compat.orbax._refuse import refuse

__getattr__ = refuse(__name__)
