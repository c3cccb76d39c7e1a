"""Sentences about paths without a checkpoint, with a remedy. No JAX."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import closing

from ostraka.errors import CheckpointNotFound, NotACheckpoint, nearest
from ostraka.formats.orbax.names import TEMPORARY, has_orbax_names, is_step
from ostraka.formats.source import names_in
from ostraka.layout.file_names import list_steps, possible_steps, step_of, steps_among
from ostraka.layout.shard_file import METADATA_NAME, is_shards_directory
from ostraka.storage import LocalStore, Store, open_above

# What a file of another program is, by its first bytes, and what to do with it. Pure.

START_BYTES = 128
"""Bytes at the start of a file that identify its format."""
LIKELY_NAMES = re.compile(
    r"checkpoint_[0-9]+|.*\.(msgpack|pt|pth|bin|ckpt|pkl|h5|hdf5|keras|gguf|npz|npy)"
)
"""Names of files that may be checkpoints of other programs."""

_SAVE = "write the result with ostraka.save"
_TORCH = (
    "a file of torch.save, which is a pickle; load it in PyTorch with weights_only=True and write "
    "it with safetensors.torch.save_file, which Ostraka reads"
)
_BY_START = {
    b"\x89HDF\r\n\x1a\n": f"an HDF5 file, as Keras writes; read it with h5py or Keras, and {_SAVE}",
    b"GGUF": "a GGUF file, whose weights are mostly quantised; convert the safetensors files that "
    "it was made of",
    b"\x93NUMPY": f"a .npy file of numpy; read it with numpy.load, and {_SAVE}",
    bytes.fromhex("80028a0a6cfc9c46f9206aa85019"): _TORCH,
}
_MAP_WITH_TEXT = re.compile(
    rb"(?:[\x81-\x8F]|\xDE..|\xDF....)(?:(?P<short>[\xA0-\xBF])|\xD9(?P<long>.))", re.DOTALL
)
"""The start of a msgpack map whose first key is a string, up to that string."""


def describe_file(start: bytes) -> str | None:
    """A description of a file by its first bytes, as the end of a sentence, or None."""
    if start.startswith(b"PK\x03\x04"):
        return _describe_zip(start)
    for magic, what in _BY_START.items():
        if start.startswith(magic):
            return what
    if len(start) > 2 and start[0] == 0x80 and 2 <= start[1] <= 5:
        return (
            "a pickle, which runs code when it is loaded; load it where you trust it, and write "
            "its arrays with ostraka.save"
        )
    match = _MAP_WITH_TEXT.match(start)
    if match is None:
        return None
    length = match["short"][0] - 0xA0 if match["short"] else match["long"][0]
    if not start[match.end() :][:length].decode("utf-8", "replace").isprintable():
        return None
    return (
        "a msgpack file, such as flax.serialization.to_bytes and flax.training.checkpoints write; "
        f"read it with flax.serialization.msgpack_restore, and {_SAVE}"
    )


def _describe_zip(start: bytes) -> str | None:
    """A description of a zip file by the name of the first file in it."""
    length = int.from_bytes(start[26:28], "little")
    name = start[30 : 30 + length]
    if name.endswith(b".npy"):
        return f"a .npz file of numpy; read it with numpy.load, and {_SAVE}"
    if name.endswith((b"/data.pkl", b"/.format_version", b"/byteorder", b"/version")):
        return _TORCH
    if name in (b"metadata.json", b"config.json"):
        return (
            "a model of Keras; load it with keras.models.load_model, and save its weights as a dict"
        )
    return None


_MOST_NAMES = 100
"""Most names of a directory to look into, so that an error does not take a minute."""
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""The form of a repo id of the Hugging Face Hub."""
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors package."""


def not_a_checkpoint(store: Store) -> CheckpointNotFound | NotACheckpoint:
    """The error for a path without a checkpoint: the likely cause, and the remedy."""
    where = store.location
    names = store.list()
    is_directory = len(names) > 0 or store.exists()
    if is_directory:
        found = _something_else(store, names)
    else:
        start = _start_of_file(store)
        found = None if start is None else _file(where, start)
    if found is not None:
        return NotACheckpoint(f"{where} {found}")
    if not is_directory:
        why = f"there is no such directory{_hint_beside(store)}"
    elif any(map(is_shards_directory, names)):
        why = f"a save to it never finished, or its {METADATA_NAME} is lost"
    elif not names:
        why = f"the directory is empty, it has no {METADATA_NAME}"
    else:
        below = [name for name in names[:_MOST_NAMES] if is_committed(store.at(name))]
        hint = f"; did you mean {where}/{below[-1]}?" if below else ""
        why = f"the directory has no {METADATA_NAME}, and there are no steps in it{hint}"
    return CheckpointNotFound(f"there is no checkpoint at {where}: {why}")


def looks_like_ours(store: Store, data: bytes) -> bool:
    """True if a save probably wrote this unreadable `_METADATA`."""
    return any(map(is_shards_directory, store.list())) or data.startswith(b'{"format":"ostraka"')


def is_committed(store: Store) -> bool:
    """True if the directory has a committed checkpoint, by Ostraka or another program."""
    return METADATA_NAME in names_in(store)


def _something_else(store: Store, names: Sequence[str]) -> str | None:
    """A description of another program's directory, or None."""
    if any(map(is_shards_directory, names)):
        return None
    if METADATA_NAME in names:
        if has_orbax_names(names):
            return (
                "is an Orbax checkpoint in a form that Ostraka does not know; restore it with "
                "Orbax, and write the result with ostraka.save"
            )
        return f"is not an Ostraka checkpoint: its {METADATA_NAME} was written by something else"
    if has_orbax_names(names):
        return "is a part of an Orbax checkpoint, and has no arrays; give the directory above it"
    if (foreign := _foreign_file(store, names)) is not None:
        return foreign
    orbax = [name for name in names[:_MOST_NAMES] if has_orbax_names(names_in(store.at(name)))]
    if orbax:
        return (
            "holds Orbax checkpoints, none of which is a finished step; give the path of one, "
            f"such as {store.location}/{orbax[-1]}"
        )
    return None


def _foreign_file(store: Store, names: Sequence[str]) -> str | None:
    """A description of the first file of another program in a directory, or None."""
    for name in filter(LIKELY_NAMES.fullmatch, names[:_MOST_NAMES]):
        known = describe_file(_start_of_file(store.at(name)) or b"")
        if known is not None:
            return f"holds no checkpoint that Ostraka reads: {name} is {known}"
    return None


def likely_steps(store: Store) -> str | None:
    """A sentence about likely checkpoints in or above a directory without steps.

    None if there are none. Then a run may begin there.
    """
    where, names = store.location, names_in(store)
    if any(map(is_shards_directory, names)):
        return f"a save to {where} itself never finished; give the Manager another directory"
    likely = {name: _likely_step(store.at(name), name) for name in names[:_MOST_NAMES]}
    found = [f"{name} {what}" for name, what in likely.items() if what is not None]
    if found:
        return found[-1] + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")
    if (file := _foreign_file(store, names)) is not None:
        return f"it {file}"
    if any(name.endswith(".safetensors") for name in names):
        return f"it holds safetensors files; read them with ostraka.restore({where!r})"
    root = open_above(store) if step_of(where.rpartition("/")[2]) is not None else None
    if root is None or not _has_steps(root, names_in(root)):
        return None
    return f"{root.location} holds steps; to go on from them, give the Manager that directory"


def _likely_step(store: Store, name: str) -> str | None:
    """A description of a directory in a run directory that looks like a checkpoint, or None."""
    names = names_in(store)
    if has_orbax_names(names):
        if step_of(name) is not None or TEMPORARY in name:
            return "is an Orbax step that was never finished"
        return f"is an Orbax checkpoint; read it with ostraka.restore({store.location!r})"
    if METADATA_NAME in names and step_of(name) is None:
        return (
            "is a checkpoint, and its name is not that of a step; read it with "
            f"ostraka.restore({store.location!r}), or call it step_00000100, by its number"
        )
    if any(one.endswith(".safetensors") for one in names):
        return f"holds safetensors files; read them with ostraka.restore({store.location!r})"
    if _has_steps(store, names):
        return f"holds steps; to go on from them, give the Manager {store.location}"
    return None


def _has_steps(root: Store, names: Sequence[str]) -> bool:
    """True if one of the highest steps among these names is a checkpoint."""
    steps = list(possible_steps(names).values())[-3:]
    return any(_is_step(root, name) for named in steps for name in named)


def _is_step(root: Store, name: str) -> bool:
    store = root.at(name)
    names = names_in(store)
    is_own = METADATA_NAME in names and step_of(name) is not None
    return is_own or has_orbax_names(names) or is_step(store, names)


def _hint_beside(store: Store) -> str:
    """The steps beside a missing step, or the most similar name."""
    above, _, name = store.location.rpartition("/")
    root = open_above(store)
    if root is None:
        return ""
    names = names_in(root)
    if not names and isinstance(store, LocalStore):
        path = os.path.relpath(store.location)
        is_repo = _REPO_ID.fullmatch(path) and step_of(name) is None
        command = f"`hf download {path} --local-dir DIR` and pass DIR"
        return f" (if it is a Hugging Face repo id, run {command})" if is_repo else ""
    steps = [
        step
        for step, found in steps_among(names).items()
        if any(_is_step(root, name) for name in found)
    ]
    if steps and step_of(name) is not None:
        return f"; the steps in {above} are {list_steps(steps)}"
    return nearest(name, names[:_MOST_NAMES])


def _start_of_file(store: Store) -> bytes | None:
    """The first bytes of a file at the path of the store. None if nothing is there."""
    where = store.location
    if isinstance(store, LocalStore) and not os.path.isfile(where):
        return b"" if os.path.exists(where) else None  # to open a pipe would take for ever
    above, name = open_above(store), where.rpartition("/")[2]
    start = bytearray(START_BYTES)
    try:
        if above is None or above.look(name) is None:
            return None
        with closing(above.open(name)) as file:
            return bytes(start[: file.read_into(0, [start])])
    except OSError:
        return b""


def _file(where: str, start: bytes) -> str:
    above, name = os.path.split(where)
    if is_shards_directory(os.path.basename(above)):
        above, name = os.path.dirname(above), METADATA_NAME
    if name == METADATA_NAME:
        return f"is a file, not a checkpoint directory: it is a part of {above}; give that"
    # With a length and a JSON object, as these begin.
    if start[8:9] == b"{" and 1 < int.from_bytes(start[:8], "little") <= _MAX_HEADER_BYTES:
        return (
            "looks like a safetensors file, and its name does not end in .safetensors; rename it "
            "to have it opened as one"
        )
    other = "a file, not a checkpoint directory; give the directory that a save was given"
    return f"is {describe_file(start) or other}"
