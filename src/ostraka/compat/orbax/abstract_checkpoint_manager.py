"""The base class of managers."""

from ostraka.compat.orbax._refuse import refuse
from ostraka.compat.orbax.checkpoint_manager import (
    AbstractCheckpointManager as AbstractCheckpointManager,
)

__getattr__ = refuse(__name__)
