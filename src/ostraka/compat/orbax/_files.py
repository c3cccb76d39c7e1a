"""Directories of custom handlers, carried inside the checkpoint as one leaf each.

A custom handler writes into an empty temporary directory. Its files become a leaf, so they are
committed atomically with the rest of the step, in a bucket too.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import inspect
import os
import pathlib
import shutil
import tempfile
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def as_path(path: Any) -> Any:
    """Return an `epath.Path` as Orbax does if etils is installed, else a `pathlib.Path`."""
    text = os.fspath(path)
    try:
        from etils import epath
    except ImportError:
        return pathlib.Path(text)
    made: Any = epath.Path(text)
    return made


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
    """Return the files below a directory as a leaf. `by` names the handler that wrote them."""
    root = pathlib.Path(directory)
    found = sorted(root.rglob("*"))
    files = {
        str(file.relative_to(root)): base64.b85encode(file.read_bytes()).decode()
        for file in found
        if file.is_file()
    }
    folders = [str(folder.relative_to(root)) for folder in found if folder.is_dir()]
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


def await_result(value: Any) -> Any:
    """Return the result of a coroutine, and any other value unchanged.

    If the coroutine returns an awaitable, or a list that has some, those are awaited too.
    """
    if not inspect.isawaitable(value):
        return value

    async def finish() -> Any:
        found = await value
        if isinstance(found, list | tuple):
            return [await item if inspect.isawaitable(item) else item for item in found]
        return await found if inspect.isawaitable(found) else found

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(finish())
    # A second loop can't run in a thread that has one.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, finish()).result()


def wait_for(futures: Any) -> None:
    """Wait for the commit futures that a handler has returned."""
    for future in futures or ():
        if hasattr(future, "result"):
            future.result()
