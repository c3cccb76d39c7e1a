"""Names of Orbax's replicating emergency manager."""

from ostraka.compat.orbax._refuse import refuse
from ostraka.compat.orbax.experimental.emergency._absent import Absent

__getattr__ = refuse(__name__)


class ReplicatorCheckpointManager(Absent):
    pass


class ReplicatorCheckpointManagerOptions(Absent):
    pass
