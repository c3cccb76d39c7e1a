"""Who is measured in a JAX process: Ostraka, and Orbax as it comes and at its best."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax

from bench.state import Template, Tree, check_same


class Contender(Protocol):
    """One way of saving and restoring a state."""

    @property
    def name(self) -> str:
        """The column of the table."""
        ...

    def save(self, path: Path, tree: Tree, /) -> None:
        """Save and wait until all of it is durable."""
        ...

    def restore(self, path: Path, like: Template, /) -> Any:
        """Bring the values back, in the places that `like` names."""
        ...

    def check(self, restored: Any, want: Tree, /) -> None:
        """Raise unless `restored` is `want`, bit for bit."""
        ...


@dataclass(frozen=True, slots=True)
class Ostraka:
    """`ostraka.save` and `ostraka.restore`, with nothing set."""

    name: str = "ostraka"

    def save(self, path: Path, tree: Tree) -> None:
        """Save; it returns when the checkpoint is durable."""
        import ostraka

        ostraka.save(path, tree)

    def restore(self, path: Path, like: Template) -> Tree:
        """Restore onto the shardings of `like`."""
        import ostraka

        return jax.block_until_ready(ostraka.restore(path, like=like))

    def check(self, restored: Tree, want: Tree) -> None:
        """Raise unless both are the same."""
        check_same(restored, want, self.name)


@dataclass(frozen=True, slots=True)
class Setting:
    """What Orbax lets its user choose; the defaults here are those of its `PyTreeCheckpointer`.

    api: "standard" (`StandardCheckpointer`), "pytree" (`Checkpointer` of a
        `PyTreeCheckpointHandler`) or "v1" (the module `orbax.checkpoint.v1`).
    bare_metadata: write neither the sharding file nor the array metadata.
    data_file_mib: the size to which OCDBT fills its data files; None leaves it at 2 GiB.
    """

    api: str = "pytree"
    use_ocdbt: bool = True
    use_zarr3: bool = False
    use_compression: bool = True
    bare_metadata: bool = False
    data_file_mib: int | None = None

    @property
    def words(self) -> str:
        """The setting as the report names it."""
        parts = [
            f"api {self.api}",
            "zarr3" if self.use_zarr3 else "zarr",
            "OCDBT" if self.use_ocdbt else "a file for each chunk",
            "compressed" if self.use_compression else "uncompressed",
        ]
        if self.bare_metadata:
            parts.append("no sharding file, no array metadata")
        if self.data_file_mib:
            parts.append(f"data files of {self.data_file_mib} MiB")
        return ", ".join(parts)

    @property
    def data_file_bytes(self) -> int | None:
        """`data_file_mib` in the unit that Orbax takes."""
        return None if self.data_file_mib is None else self.data_file_mib * 2**20


AS_IT_COMES = Setting(api="standard")

# The fastest here, by `python -m bench.knobs`. What counts is to switch compression off; then few
# large leaves like a file for each chunk, and many small ones OCDBT, in both directions.
BEST_LARGE = Setting(api="v1", use_ocdbt=False, use_compression=False)
BEST_MANY = Setting(api="v1", use_compression=False)
BEST_PROCESSES = Setting(use_ocdbt=False, use_compression=False)


class Orbax:
    """Orbax with one setting. The checkpointer is made once, as in a training run."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.name = name
        self._save, self._restore = _BINDERS[setting.api](setting)

    def save(self, path: Path, tree: Tree) -> None:
        """Save; return when the checkpoint is final."""
        self._save(path, tree)

    def restore(self, path: Path, like: Template) -> Tree:
        """Restore onto the shardings of `like`."""
        return jax.block_until_ready(self._restore(path, like))

    def check(self, restored: Tree, want: Tree) -> None:
        """Raise unless both are the same."""
        check_same(restored, want, self.name)


_Calls = tuple[Callable[[Path, Tree], None], Callable[[Path, Template], Tree]]


def _bind_standard(_: Setting) -> _Calls:
    """As Orbax's documentation writes it."""
    import orbax.checkpoint as ocp

    checkpointer = ocp.StandardCheckpointer()

    def save(path: Path, tree: Tree) -> None:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()

    return save, checkpointer.restore


def _bind_pytree(setting: Setting) -> _Calls:
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=setting.use_ocdbt,
        use_zarr3=setting.use_zarr3,
        use_compression=setting.use_compression,
        **(_bare_registry() if setting.bare_metadata else {}),
    )
    checkpointer = ocp.Checkpointer(handler)

    def save(path: Path, tree: Tree) -> None:
        args = ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=setting.data_file_bytes)
        checkpointer.save(path, args=args)

    def restore(path: Path, like: Template) -> Tree:
        where = ocp.checkpoint_utils.construct_restore_args(like)
        return checkpointer.restore(path, args=ocp.args.PyTreeRestore(like, restore_args=where))

    return save, restore


def _bare_registry() -> dict[str, Any]:
    from orbax.checkpoint import type_handlers

    arrays = type_handlers.ArrayHandler(array_metadata_store=None, enable_write_sharding_file=False)
    return {
        "type_handler_registry": type_handlers.create_type_handler_registry((jax.Array, arrays))
    }


def _bind_v1(setting: Setting) -> _Calls:
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    saving = context.array.saving
    saving.use_ocdbt = setting.use_ocdbt
    saving.use_zarr3 = setting.use_zarr3
    saving.use_compression = setting.use_compression
    saving.ocdbt_target_data_file_size = setting.data_file_bytes

    def save(path: Path, tree: Tree) -> None:
        with context:
            ocp.save(str(path), tree)

    def restore(path: Path, like: Template) -> Tree:
        with context:
            return ocp.load(str(path), like)

    return save, restore


_BINDERS: dict[str, Callable[[Setting], _Calls]] = {
    "standard": _bind_standard,
    "pytree": _bind_pytree,
    "v1": _bind_v1,
}


def make_contenders(best: Setting, *, say: Callable[[str], None]) -> list[Contender]:
    """Ostraka, Orbax as it comes, Orbax at its best; who can't be imported is left out aloud."""
    found: list[Contender] = []
    try:
        import ostraka

        _ = ostraka.save, ostraka.restore
        found.append(Ostraka())
    except (ImportError, AttributeError) as error:
        say(f"Ostraka is left out, and with it the bare reads and writes: {error}")
    try:
        found += [Orbax("orbax", AS_IT_COMES), Orbax("orbax_best", best)]
    except ImportError as error:
        say(f"Orbax is left out: {error}")
    return found


def hush() -> None:
    """Keep the contenders' chatter out of the output."""
    import logging

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
