"""Run a function in several real JAX processes, make stores fail, and test your own store.

Every process is a fresh interpreter with its own CPU devices, joined to the others by
`jax.distributed` on 127.0.0.1. The results say what the functions returned, printed and raised, and
how the processes ended. POSIX only. This module does not import JAX.

    from ostraka.testing import run_processes

    def count_devices():
        import jax
        return jax.process_index(), jax.device_count()

    def test_devices():
        results = run_processes(count_devices, processes=2, devices_per_process=4)
        assert [r.value for r in results] == [(0, 8), (1, 8)]

`FaultyStore` is a store over another one. It fails, lags, cuts reads short or loses what was not
synced:

    from ostraka.testing import FaultyStore

    def test_a_full_disk():
        store = FaultyStore("runs/7", fail={"create": OSError(errno.ENOSPC, "no space")})
        with pytest.raises(SaveFailed, match="no space"):
            ostraka.save(store, tree)

`StoreTests` is the conformance suite of stores. Subclass it, and pytest runs every check on a store
of your own. It needs pytest, which is imported when you first use it:

    from ostraka.testing import StoreTests

    class TestShelfStore(StoreTests):
        def make_store(self, directory):
            return ShelfStore(directory / "shelf")
"""

from typing import TYPE_CHECKING, Any

from ostraka.testing._processes import (
    ProcessesFailed,
    ProcessResult,
    free_port,
    kill_when,
    preloaded,
    run_processes,
)
from ostraka.testing._stores import FaultyStore

if TYPE_CHECKING:
    from ostraka.testing._store_tests import StoreTests

__all__ = [
    "FaultyStore",
    "ProcessResult",
    "ProcessesFailed",
    "StoreTests",
    "free_port",
    "kill_when",
    "preloaded",
    "run_processes",
]


def __getattr__(name: str) -> Any:
    if name != "StoreTests":
        raise AttributeError(f"module 'ostraka.testing' has no attribute {name!r}")
    import pytest

    pytest.register_assert_rewrite("ostraka.testing._store_tests")
    from ostraka.testing._store_tests import StoreTests

    return StoreTests
