"""A second format, through the reader protocol alone: one .npy file a leaf."""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka import formats
from ostraka.cli import main
from ostraka.errors import UnsupportedFormat
from ostraka.formats.source import OnBytes, Saved, StoredBox, StoredFile
from ostraka.layout.spec import LeafSpec, Target
from ostraka.storage import Store
from ostraka.tree.json_tree import saved_tree
from ostraka.tree.nodes import Branch, Leaf


class NpySource:
    """The tree is a dict; its leaf `x` is the array in `x.npy`."""

    def __init__(self, store: Store, names: list[str]):
        self.store, self.location, self._names = store, store.location, names
        self._arrays = [np.load(io.BytesIO(store.get(name))) for name in names]
        keys = [name.removesuffix(".npy") for name in names]
        leaves = [
            LeafSpec(key, "numpy", array.dtype.name, array.shape)
            for key, array in zip(keys, self._arrays, strict=True)
        ]
        self.saved = Saved("npy", {"dict": keys, "items": [*range(len(keys))]}, tuple(leaves))

    @property
    def tree(self) -> Branch | Leaf:
        return saved_tree(self.saved.tree, [leaf.path for leaf in self.saved.leaves])

    def tree_for(self, like: Branch | Leaf) -> Branch | Leaf:
        return self.tree

    def read(
        self, targets: Sequence[Target], *, on_bytes: OnBytes | None = None
    ) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        for number, (leaf, box, _) in enumerate(targets):
            yield number, self._arrays[leaf][tuple(slice(*span) for span in box)].copy()

    def order(self) -> Sequence[int]:
        return range(len(self._names))

    @property
    def reads_whole_rows(self) -> bool:
        return True

    def grid_of(self, leaf: int) -> tuple[int, ...]:
        return (1,) * self._arrays[leaf].ndim

    def files_of(self, leaf: int) -> list[str]:
        return [self._names[leaf]]

    def boxes_of(self, leaf: int) -> list[StoredBox]:
        array = self._arrays[leaf]
        box = tuple((0, n) for n in array.shape)
        return [StoredBox(box, self._names[leaf], 0, 128, array.nbytes, array.nbytes)]

    def files(self) -> list[StoredFile]:
        return [StoredFile(n, a.nbytes) for n, a in zip(self._names, self._arrays, strict=True)]

    def is_current(self) -> bool:
        return True


def open_npy(store: Store) -> NpySource | None:
    names = [name for name in store.list() or [] if name.endswith(".npy")]
    return NpySource(store, names) if names else None


ARRAYS = {"kernel": np.arange(64, dtype=np.float32).reshape(8, 8), "step": np.array([7], np.int32)}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, array in ARRAYS.items():
        np.save(tmp_path / name, array)
    monkeypatch.setattr(formats, "FORMATS", [*formats.FORMATS, open_npy])
    return tmp_path


def run(*arguments: Any, exit_code: int = 0) -> str:
    found = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert found.exit_code == exit_code, found.output
    return found.output


def test_it_opens_and_restores_onto_a_mesh(saved: Path):
    kernel = ostraka.open(saved)["kernel"][2:4, ::3]
    assert np.array_equal(kernel, ARRAYS["kernel"][2:4, ::3])
    jax.tree.map(np.testing.assert_array_equal, ostraka.restore(saved), ARRAYS)
    like: Any = {"kernel": jax.ShapeDtypeStruct((8, 8), np.float32)}
    onto = ostraka.restore(saved, like, mesh={"x": 4, "y": 2}, specs=P("x", "y"))["kernel"]
    assert onto.sharding.spec == P("x", "y")
    assert np.array_equal(onto, ARRAYS["kernel"])


def test_it_is_shown_and_compared(saved: Path):
    assert "kernel.npy" in run("show", saved, "--stats", "--files")
    document = json.loads(run("show", saved, "kernel", "--slice", "0,:3", "--json"))
    assert document["slice"]["values"] == [0.0, 1.0, 2.0]
    ostraka.save(saved / "ours", ARRAYS | {"step": np.array([8], np.int32)})
    found = json.loads(run("diff", saved, saved / "ours", "--json", exit_code=1))
    assert {leaf["path"]: leaf["differs"] for leaf in found["leaves"]} == {
        "kernel": [],
        "step": ["value"],
    }


def test_it_is_planned_as_it_would_be_saved_and_has_nothing_to_verify(saved: Path):
    assert ostraka.plan(str(saved)).data_bytes == 8 * 8 * 4 + 4
    with pytest.raises(UnsupportedFormat, match="it has no digests to compare with"):
        ostraka.verify(saved)
