"""Names of Orbax's emergency manager."""

from ostraka.compat.orbax._refuse import refuse
from ostraka.compat.orbax.experimental.emergency._absent import Absent

__getattr__ = refuse(__name__)


class CheckpointManager(Absent):
    pass


class CheckpointManagerOptions(Absent):
    pass


class LocalCheckpointOptions(Absent):
    pass


class PersistentCheckpointOptions(Absent):
    pass
