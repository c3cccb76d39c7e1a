"""What a file of another program is, by its first bytes, and what to do with it. Pure.

None of these formats is read. Pickles run code, and the others have readers of their own.
"""

from __future__ import annotations

import re

START_BYTES = 128
"""How many bytes of a file tell what it is."""
LIKELY_NAMES = re.compile(
    r"checkpoint_[0-9]+|.*\.(msgpack|pt|pth|bin|ckpt|pkl|h5|hdf5|keras|gguf|npz|npy)"
)
"""Names of files that may be one of these."""

_SAVE = "write the result with ostraka.save"
_FLAX = (
    "a msgpack file, such as flax.serialization.to_bytes and flax.training.checkpoints write; read "
    "it with flax.serialization.msgpack_restore, and " + _SAVE
)
_TORCH = (
    "a file of torch.save, which is a pickle; load it in PyTorch with weights_only=True and write "
    "it with safetensors.torch.save_file, which Ostraka reads"
)
_PICKLE = (
    "a pickle, which runs code when it is loaded; load it where you trust it, and write its arrays "
    "with ostraka.save"
)
_KERAS = "a model of Keras; load it with keras.models.load_model, and save its weights as a dict"
_HDF5 = "an HDF5 file, as Keras writes; read it with h5py or Keras, and " + _SAVE
_GGUF = (
    "a GGUF file, whose weights are mostly quantised; convert the safetensors files that it was "
    "made of"
)
_NPZ = "a .npz file of numpy; read it with numpy.load, and " + _SAVE
_NPY = "a .npy file of numpy; read it with numpy.load, and " + _SAVE
_LEGACY_TORCH = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")
_FIRST_LETTER, _MAP_16, _MAP_32, _TEXT_8 = 0xA0, 0xDE, 0xDF, 0xD9


def describe_file(start: bytes) -> str | None:
    """What a file that begins like this is, as the end of a sentence; None if that is not known."""
    if start.startswith(b"PK\x03\x04"):
        return _describe_zip(start)
    for magic, what in (
        (b"\x89HDF\r\n\x1a\n", _HDF5),
        (b"GGUF", _GGUF),
        (b"\x93NUMPY", _NPY),
        (_LEGACY_TORCH, _TORCH),
    ):
        if start.startswith(magic):
            return what
    if len(start) > 2 and start[0] == 0x80 and 2 <= start[1] <= 5:
        return _PICKLE
    return _FLAX if _is_msgpack(start) else None


def _describe_zip(start: bytes) -> str | None:
    """By the name of the first file in it."""
    length = int.from_bytes(start[26:28], "little")
    name = start[30 : 30 + length]
    if name.endswith(b".npy"):
        return _NPZ
    if name.endswith((b"/data.pkl", b"/.format_version", b"/byteorder", b"/version")):
        return _TORCH
    if name in (b"metadata.json", b"config.json"):
        return _KERAS
    return None


def _is_msgpack(start: bytes) -> bool:
    """Whether it begins as a map whose first key is a text."""
    if not start:
        return False
    at = {_MAP_16: 3, _MAP_32: 5}.get(start[0], 1)
    if at == 1 and not 0x81 <= start[0] <= 0x8F:
        return False
    kind = start[at : at + 1]
    if not kind:
        return False
    if _FIRST_LETTER <= kind[0] < _FIRST_LETTER + 32:
        text = start[at + 1 : at + 1 + kind[0] - _FIRST_LETTER]
    elif kind[0] == _TEXT_8:
        text = start[at + 2 : at + 2 + int.from_bytes(start[at + 1 : at + 2], "little")]
    else:
        return False
    return text.decode("utf-8", "replace").isprintable()
