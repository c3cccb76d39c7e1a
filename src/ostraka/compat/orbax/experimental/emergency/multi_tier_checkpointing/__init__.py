"""Checkpoints in several tiers, which the drop-in does not have."""

from ostraka.compat.orbax._refuse import refuse

__getattr__ = refuse(__name__)
