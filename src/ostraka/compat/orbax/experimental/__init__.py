"""`experimental.v1`, as v1 was called first."""

from importlib import import_module as _import_module
from typing import Any as _Any

from ostraka.compat.orbax._refuse import refuse as _refuse

_refused = _refuse(__name__)


def __getattr__(name: str) -> _Any:
    if name in ("v1", "emergency"):
        return _import_module(f"{__name__}.{name}")
    return _refused(name)
