"""`experimental.v1`, as v1 was called first."""

from importlib import import_module as _import_module
from typing import Any as _Any

from ostraka.compat.orbax._refuse import refuse as _refuse

_refused = _refuse(__name__)


def __getattr__(name: str) -> _Any:
    if name == "v1":
        return _import_module(f"{__name__}.v1")
    return _refused(name)
