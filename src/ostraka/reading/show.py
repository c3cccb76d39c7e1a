"""Arrays and writers of checkpoints in words, for the command and for notebooks. No JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostraka.common.text import shorten, show_value
from ostraka.errors import printable
from ostraka.formats.source import Saved
from ostraka.layout.spec import HOST_LOCAL, LeafSpec, MeshSpec, show_partition
from ostraka.sharding.leaves import without_trailing
from ostraka.tree.nodes import Kept, UnreadableLeaf

_MOST_CHARACTERS = 60


def show_dtype(leaf: LeafSpec) -> str:
    """The dtype of an array. For PRNG keys, their implementation."""
    return leaf.dtype if leaf.prng is None else f"key<{leaf.prng}>"


def show_sharding(leaf: LeafSpec, meshes: Sequence[MeshSpec], *, with_mesh: bool = False) -> str:
    """How an array is sharded, or where else it is."""
    if leaf.per_process:
        return f"one for each of {leaf.shape[0]} processes"
    if leaf.mesh == HOST_LOCAL:
        return "host memory"
    memory = "" if leaf.memory is None else f" in {leaf.memory}"
    mesh = meshes[leaf.mesh]
    if not mesh.axis_names:
        return f"one device{memory}"
    if with_mesh:
        return f"{show_partition(without_trailing(leaf.partition))} on {mesh}{memory}"
    return f"{show_partition(leaf.partition)}{memory}"


def show_writer(writer: Mapping[str, Any]) -> str:
    """When a checkpoint was saved, and by which versions."""
    when = text_in(writer, "time") or "at an unknown time"
    if when.endswith("+00:00"):
        when = f"{when[:19].replace('T', ' ')} UTC"
    version = text_in(writer, "ostraka") or "(unknown version)"
    by = f"{when} by {text_in(writer, 'library') or f'ostraka {version}'}"
    jax = text_in(writer, "jax")
    return f"{by} with jax {jax}" if jax else by


def show_leaf_value(value: Any) -> tuple[str, str]:
    """The type and the text of a leaf that is no array."""
    if isinstance(value, Kept):  # A function or the like, which a template provides.
        return "not saved", value.name
    if isinstance(value, UnreadableLeaf):
        return "lost", value.why
    return type(value).__name__, shorten(printable(show_value(value)), _MOST_CHARACTERS)


def hosts_of(saved: Saved) -> dict[int, str]:
    """The host of each process that saved. Empty if `_METADATA` has no valid list of them."""
    found: Any = saved.writer.get("hosts")
    hosts: list[Any] = found if isinstance(found, list) else []
    return dict(enumerate(hosts)) if all(isinstance(host, str) for host in hosts) else {}


def text_in(document: Mapping[str, Any], name: str) -> str:
    """The beginning of a text in a document of others, or an empty one."""
    found = document.get(name)
    return shorten(found, _MOST_CHARACTERS) if isinstance(found, str) else ""
