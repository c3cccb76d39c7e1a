"""Checkpointables of v1: trees, and objects that save and load themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ostraka.compat.orbax._engine import Item, Payload
from ostraka.compat.orbax._files import empty_directory, pack, unpack
from ostraka.compat.orbax._pytree import pytree_payload, read_as_saved, read_standard
from ostraka.compat.orbax.v1._context import Context


@runtime_checkable
class StatefulCheckpointable(Protocol):
    """An object that writes itself into a directory, and reads itself from one."""

    async def save(self, directory: Any) -> Any: ...

    async def load(self, directory: Any) -> Any: ...


class _Directory:
    """The directory that `save` of an object gets: it is there already."""

    def __init__(self, path: Any):
        self.path = path

    async def await_creation(self) -> Any:
        return self.path

    def __truediv__(self, name: Any) -> _Directory:
        return _Directory(self.path / name)

    def __fspath__(self) -> str:
        return str(self.path)


def run_twice(coroutine: Any) -> None:
    """Await a coroutine and what it returns, in a thread: a loop may run in this one."""
    errors: list[BaseException] = []

    async def both() -> None:
        rest = await coroutine
        if rest is not None:
            await rest

    def run() -> None:
        try:
            asyncio.run(both())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def is_stateful(value: Any) -> bool:
    return not isinstance(value, type) and isinstance(value, StatefulCheckpointable)


def payload_of_checkpointable(value: Any, context: Context) -> Payload:
    if not is_stateful(value):
        return pytree_payload(value, context.save_args(value), "pytree")
    with empty_directory() as directory:
        run_twice(value.save(_Directory(directory)))
        return Payload("files", pack(directory, type(value).__qualname__), "stateful")


def payloads_of(checkpointables: Mapping[str, Any], context: Context) -> dict[str, Payload]:
    return {name: payload_of_checkpointable(v, context) for name, v in checkpointables.items()}


def read_checkpointable(item: Item, abstract: Any, context: Context) -> Any:
    """One checkpointable: as saved, like an abstract tree, or into an object with `load`."""
    if abstract is not None and is_stateful(abstract):
        with empty_directory() as directory:
            unpack(item.states(), directory)
            run_twice(abstract.load(directory))
        return abstract
    if item.kind == "files":
        raise ValueError(
            f"{item.path} was saved by an object with save() and load(); give one to load into"
        )
    if abstract is None:
        return read_as_saved(item)
    return read_standard(item, abstract, partial=context.is_partial, strict=context.is_strict)
