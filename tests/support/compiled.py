"""What was compiled once is not compiled again, in this process or in one that it starts."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def compiled_in(directory: str | Path) -> Generator[None]:
    """Have JAX keep what it compiles in a directory.

    For tests that start one process at a time: JAX writes the files of its cache in place, where
    another process may read half of one. A process of `run_processes` calls this itself: variables
    of the environment would keep it from being forked from one that has imported JAX.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    settings = {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.2,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
