"""The name by which programs begin to use several tiers."""

from typing import Any

from ostraka.compat.orbax._refuse import refuse
from ostraka.compat.orbax.experimental.emergency._absent import refuse_use

__getattr__ = refuse(__name__)


def initialize_multi_tier_checkpointing(*args: Any, **options: Any) -> Any:
    raise refuse_use("initialize_multi_tier_checkpointing")
