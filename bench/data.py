"""The values that every contender saves: numpy only, so that the PyTorch ranks make them too."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BLOCKS = 8
"""Every leaf is made of this many blocks of rows, so that a process makes only what it holds."""


@dataclass(frozen=True, slots=True)
class Size:
    """How many float32 leaves a state has, and the shape of each."""

    leaves: int
    rows: int
    columns: int

    @property
    def leaf_bytes(self) -> int:
        """Bytes of one leaf."""
        return self.rows * self.columns * 4

    @property
    def state_bytes(self) -> int:
        """Bytes of the whole state."""
        return self.leaves * self.leaf_bytes

    @property
    def names(self) -> list[str]:
        """The keys of the state, in order."""
        return [f"leaf_{i:04d}" for i in range(self.leaves)]


def few_large(scale: float) -> Size:
    """1 GiB in 64 leaves of 16 MiB; `scale` shortens the leaves."""
    return Size(64, max(1, round(2048 * scale / BLOCKS)) * BLOCKS, 2048)


def many_small(scale: float) -> Size:
    """1,000 leaves of 256 KiB; `scale` takes away leaves."""
    return Size(max(8, round(1000 * scale)), 256, 256)


def make_block(size: Size, leaf: int, block: int) -> np.ndarray:
    """Rows `block / BLOCKS` of a leaf: normal noise, which looks like weights to a compressor."""
    rng = np.random.Generator(np.random.SFC64([leaf, block]))
    return rng.standard_normal((size.rows // BLOCKS, size.columns), dtype=np.float32)


def make_rows(size: Size, leaf: int, start: int, stop: int) -> np.ndarray:
    """Rows `[start, stop)` of a leaf; both lie on block borders."""
    step = size.rows // BLOCKS
    blocks = [make_block(size, leaf, b) for b in range(start // step, stop // step)]
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
