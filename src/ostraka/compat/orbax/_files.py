"""What handlers write into a directory of their own, carried inside the checkpoint.

A handler of the user's gets an empty directory in memory's stead, and what it has written there
becomes one leaf: so it appears with the rest of the step, in one atomic event, in a bucket too.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pathlib
import shutil
import tempfile
from collections.abc import Generator, Mapping
from typing import Any

from ostraka.compat.orbax._place import as_path


class Files:
    """A leaf: the files that this process wrote. The engine keeps one state for each process."""

    def __init__(self, state: Mapping[str, Any]):
        self._state = dict(state)

    def get_state(self) -> dict[str, Any]:
        return self._state

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)


@contextlib.contextmanager
def empty_directory() -> Generator[Any]:
    made = tempfile.mkdtemp(prefix="ostraka-orbax-")
    try:
        yield as_path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def pack(directory: Any, by: str) -> Files:
    root = pathlib.Path(directory)
    files = {
        str(file.relative_to(root)): base64.b85encode(file.read_bytes()).decode()
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }
    folders = [str(f.relative_to(root)) for f in sorted(root.rglob("*")) if f.is_dir()]
    return Files({"by": by, "files": files, "folders": folders})


def unpack(states: tuple[Any, ...], directory: Any) -> None:
    """Write the files of all processes into a directory."""
    root = pathlib.Path(directory)
    for state in states:
        for folder in state["folders"]:
            _inside(root, folder).mkdir(parents=True, exist_ok=True)
        for name, content in state["files"].items():
            file = _inside(root, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(base64.b85decode(content))


def _inside(root: pathlib.Path, name: str) -> pathlib.Path:
    path = pathlib.PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"the checkpoint has a file {name!r}, which is outside of its directory")
    return root / path


def resolve(value: Any) -> Any:
    """What a handler's function returned, waited for: a coroutine, futures, or the value itself."""
    if asyncio.iscoroutine(value):
        return asyncio.run(_await(value))
    return value


async def _await(coroutine: Any) -> Any:
    found = await coroutine
    if isinstance(found, list | tuple):
        return [await item if asyncio.isfuture(item) else item for item in found]
    return found


def wait_for(futures: Any) -> None:
    """Wait for the commit futures that a handler has returned."""
    for future in futures or ():
        if hasattr(future, "result"):
            future.result()
