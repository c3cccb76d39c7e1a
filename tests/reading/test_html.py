"""Checkpoints, arrays, plans and reports as HTML."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from html_pages import read_html, texts_in
from ostraka.common import html
from ostraka.common.html import text
from ostraka.errors import LostBox, Problem, printable
from ostraka.integrity import VerifyReport
from ostraka.layout.file_names import ADDED_NAME

MARKUP = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</details></div></span>",
    "' onmouseover='alert(1)",
    "&lt;b&gt;",
    "\x1b[31mred\x00\n",
    "right\u202eleft",
    "<!-- comment",
)


def sharded(shape: tuple[int, ...], spec: P, **axes: int) -> jax.Array:
    devices = np.array(jax.devices()[: int(np.prod([*axes.values()]))])
    mesh = Mesh(devices.reshape(*axes.values()), tuple(axes))
    return jax.device_put(np.zeros(shape, np.float32), NamedSharding(mesh, spec))


def layers_of(count: int) -> dict[int, Any]:
    return {n: {"kernel": np.zeros((4, 2), np.float32)} for n in range(count)}


def test_a_checkpoint_shows_its_size_and_a_folded_tree(tmp_path: Path):
    kernel = sharded((8, 6), P("data"), data=4)
    tree = {"model": {"again": kernel, "kernel": kernel, "layers": layers_of(12)}, "name": "run"}
    ostraka.save(tmp_path / "a", tree, metadata={"git": "abc123"})
    page = ostraka.open(tmp_path / "a")._repr_html_()
    reader = read_html(page)
    shown = reader.texts
    assert reader.folded == page.count("<details") == 3
    for name, value in {
        "parameters": f"{8 * 6 + 12 * 8:,}",
        "size": f"{4 * (8 * 6 + 12 * 8)} B",
        "arrays": "13",
        "mesh": "data=4",
    }.items():
        assert shown[shown.index(name) + 1] == value
    assert " ".join(shown).count("float32") == 2
    at = shown.index("again")
    assert shown[at : at + 5] == ["again", "float32", "8 × 6", "P('data')", "192 B"]
    assert "= model/again" in shown
    assert {"layers/0..11/kernel", "12 × 32 B", "'run'", "git", "'abc123'"} <= {*shown}
    assert "by ostraka" in shown[shown.index("saved") + 1]


def test_layers_are_one_block_whatever_their_values_and_shared_arrays(tmp_path: Path):
    layers: dict[int, Any] = layers_of(3)
    for number, layer in layers.items():
        layer |= {"tied": layer["kernel"], "rate": number / 10, "name": "mlp"}
    ostraka.save(tmp_path / "a", layers)
    shown = texts_in(ostraka.open(tmp_path / "a")._repr_html_())
    assert shown[shown.index("0..2") + 1] == "3 × 4 leaves, 96 B"
    assert {"3 shared arrays", "3 values", "'mlp'"} <= {*shown}


def test_a_part_shows_its_own_leaves(tmp_path: Path):
    ostraka.save(tmp_path / "a", {"model": layers_of(3), "rest": np.zeros(1000, np.float32)})
    shown = texts_in(ostraka.open(tmp_path / "a")["model"]._repr_html_())
    assert shown[shown.index("part") + 1] == "model"
    assert shown[shown.index("parameters") + 1] == "24"
    assert "rest" not in shown


def test_metrics_are_shown_with_those_that_were_added(tmp_path: Path):
    with ostraka.Manager(tmp_path) as manager:
        manager.save(7, layers_of(1), metrics={"loss": 0.25})
    shown = texts_in(ostraka.open(tmp_path)._repr_html_())
    assert "loss = 0.25" in shown
    assert "ostraka.manager" not in shown
    ostraka.annotate(tmp_path / "7", metrics={"eval": 3})
    assert "loss = 0.25, eval = 3" in texts_in(ostraka.open(tmp_path)._repr_html_())
    (Path(ostraka.open(tmp_path).path) / ADDED_NAME).write_text("{")
    found = [t for t in texts_in(ostraka.open(tmp_path)._repr_html_()) if "loss = 0.25" in t]
    assert "(added metrics can't be read: " in found[0]


def test_an_array_shows_its_sharding_and_its_files(tmp_path: Path):
    ostraka.save(tmp_path / "a", {"kernel": sharded((8, 6), P("data"), data=4)})
    shown = texts_in(ostraka.open(tmp_path / "a")["kernel"]._repr_html_())
    for name, value in {
        "dtype": "float32",
        "shape": "8 × 6",
        "sharding": "P('data')",
        "mesh": "data=4",
        "size": "192 B",
        "files": "4",
    }.items():
        assert shown[shown.index(name) + 1] == value
    assert shown[shown.index("[2:4, 0:6]") + 1] == "48 B"
    assert sum(line.endswith(".safetensors") for line in shown) == 4


def test_an_array_of_many_slices_shows_the_number_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ostraka.reading.html._MOST_BOXES", 3)
    ostraka.save(tmp_path / "a", {"kernel": sharded((8, 6), P("data"), data=4)})
    shown = texts_in(ostraka.open(tmp_path / "a")["kernel"]._repr_html_())
    assert shown[shown.index("files") + 1] == "4"
    assert "[2:4, 0:6]" not in shown


@pytest.mark.parametrize("compress", [None, "zstd"])
def test_nothing_of_arrays_is_read_and_jax_is_not_imported(tmp_path: Path, compress: Any):
    ostraka.save(tmp_path / "a", {"kernel": np.zeros((512, 512), np.float32)}, compress=compress)
    for file in tmp_path.glob("a/*/*"):
        file.unlink()
    program = (
        "import sys, ostraka\n"
        "found = ostraka.open(sys.argv[1])\n"
        "pages = found._repr_html_() + found['kernel']._repr_html_()\n"
        "assert 'jax' not in sys.modules\n"
        "print(pages)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "a")]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    shown = texts_in(done.stdout.strip())
    assert shown.count("512 × 512") == 2
    assert compress is None or any("its files can't be listed: " in line for line in shown)


def test_names_never_become_markup(tmp_path: Path):
    directory = tmp_path / '<i>run"&'
    axis = MARKUP[0]
    tree = {name: {name: np.zeros(2, np.float32), "text": name} for name in MARKUP}
    tree["sharded"] = {"array": sharded((8,), P(axis), **{axis: 4})}
    with ostraka.Manager(directory) as manager:
        manager.save(1, tree, metrics=dict.fromkeys(MARKUP, 1), metadata={n: n for n in MARKUP})
    checkpoint = ostraka.open(directory)
    shown = "".join(texts_in(checkpoint._repr_html_()))
    for name in MARKUP:
        assert printable(name.replace("/", "~1"))[:20] in shown
        assert f"{printable(name)} = 1" in shown
    assert '<i>run"&' in shown
    for path in checkpoint:
        value = checkpoint[path]
        if isinstance(value, ostraka.LazyArray):
            assert printable(path) in "".join(texts_in(value._repr_html_()))
    for page in (
        ostraka.plan(checkpoint.path)._repr_html_(),
        ostraka.plan(checkpoint.path).restore()._repr_html_(),
        ostraka.verify(directory)._repr_html_(),
        ostraka.verify(directory, all_steps=True)._repr_html_(),
        ostraka.repair(directory)._repr_html_(),
        ostraka.copy(directory, tmp_path / "<b>copy")._repr_html_(),
        ostraka.convert(directory, tmp_path / "<b>orbax", to="orbax")._repr_html_(),
        ostraka.merge([directory, directory], tmp_path / "<b>merged")._repr_html_(),
    ):
        texts_in(page)


@pytest.mark.parametrize("number", [20_000, pytest.param(100_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("names", ["alike", "different"])
def test_many_leaves_make_a_small_page(tmp_path: Path, names: str, number: int):
    letters = str.maketrans("0123456789", "abcdefghij")
    model = {
        {
            "alike": f"layer_{n}",
            "different": f"{n}".translate(letters) + "\"'&<>" * 20,
        }[names]: np.zeros(1, np.float32)
        for n in range(number)
    }
    ostraka.save(tmp_path / "a", {"model": model, "b": 1})
    page = ostraka.open(tmp_path / "a")._repr_html_()
    shown = texts_in(page)
    assert len(page) < 200_000
    assert f"{number + 1:,} leaves" in shown
    if names == "alike":
        assert f"model/layer_0..{number - 1}" in shown
    else:
        assert any(line.startswith(f"… and {number - 100:,}"[:8]) for line in shown)


def test_a_tree_of_many_names_is_cut_with_the_number_of_leaves(tmp_path: Path):
    tree = {f"a{x}z": {f"b{y}z": np.zeros(x * 30 + y) for y in range(30)} for x in range(30)}
    ostraka.save(tmp_path / "a", tree)
    page = ostraka.open(tmp_path / "a")._repr_html_()
    shown = texts_in(page)
    assert {f"a{x}z" for x in range(30)} <= {*shown}
    assert shown.count("… and 30 leaves more, not shown here") > 10
    assert len(page) < 100_000


def test_values_of_all_kinds_are_shown(tmp_path: Path):
    tree = {"long": 10**5000, "none": None, "key": jax.random.key(0), "text": "x" * 1000}
    ostraka.save(tmp_path / "a", tree)
    shown = texts_in(ostraka.open(tmp_path / "a")._repr_html_())
    assert any(line.startswith("0x") and line.endswith("…") for line in shown)
    assert {"None", "key<threefry2x32>"} <= {*shown}
    assert max(map(len, shown)) < 500


def test_orbax_and_safetensors_are_shown(tmp_path: Path):
    ostraka.save(tmp_path / "a", {"model": {"kernel": np.ones((3, 4), np.float32)}})
    ostraka.convert(tmp_path / "a", tmp_path / "orbax", to="orbax")
    ostraka.convert(tmp_path / "a", tmp_path / "x.safetensors", to="safetensors")
    for name in ("orbax", "x.safetensors"):
        checkpoint = ostraka.open(tmp_path / name)
        assert "3 × 4" in texts_in(checkpoint._repr_html_())
        (path,) = checkpoint
        assert "[0:3, 0:4]" in texts_in(checkpoint[path]._repr_html_())


# Plans and reports


def test_a_plan_shows_its_numbers():
    planned = ostraka.plan("gpt2", mesh={"data": 8}, processes=2, optimizer="adamw")
    reader = read_html(planned._repr_html_())
    shown = reader.texts
    assert reader.folded == planned._repr_html_().count("<details")
    assert shown[shown.index("devices") + 1] == "8 on 2 hosts"
    assert shown[shown.index("parameters") + 1] == f"{planned.parameters:,}"
    assert f"{planned.total_bytes:,}" in shown[shown.index("files") + 1]
    assert {"optimizer mu", "a host", "the disk of a host"} <= {*shown}
    restored = planned.restore(mesh={"data": 4}, processes=1)
    shown = texts_in(restored._repr_html_())
    assert shown[shown.index("mesh") + 1] == "data=4"
    assert f"{restored.read_bytes.most:,} bytes" in shown[shown.index("read by a process") + 1]


def test_reports_show_their_results(tmp_path: Path):
    ostraka.save(tmp_path / "a", {"kernel": np.ones((64, 64), np.float32)}, parity=1)
    report = ostraka.copy(tmp_path / "a", tmp_path / "copy")
    assert any(line.startswith("1 checkpoint, ") for line in texts_in(report._repr_html_()))
    shown = texts_in(
        ostraka.merge([tmp_path / "a", tmp_path / "copy"], tmp_path / "m")._repr_html_()
    )
    assert shown[shown.index("averaged") + 1] == "1 array"
    assert shown.count("0.5") == 2
    shown = texts_in(ostraka.convert(tmp_path / "a", tmp_path / "n.npz", to="npz")._repr_html_())
    assert shown[shown.index("format") + 1] == "npz"
    assert "intact" in texts_in(ostraka.verify(tmp_path / "a")._repr_html_())
    shard = next((tmp_path / "a").glob("*/shard_*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    damaged = read_html(ostraka.verify(tmp_path / "a", raises=False)._repr_html_())
    assert "1 problem" in damaged.texts
    assert damaged.folded == 1  # the leaf, while the problem itself is open
    assert damaged.texts[damaged.texts.index("kernel") + 1] == "12.5%"
    repaired = texts_in(ostraka.repair(tmp_path / "a")._repr_html_())
    assert "1 file repaired" in repaired
    assert "1 repaired file" in repaired


def test_a_report_of_steps_lists_them(tmp_path: Path):
    with ostraka.Manager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"kernel": np.ones(64, np.float32)})
    shutil.rmtree(next(tmp_path.glob("*1/shards-*")))
    shown = texts_in(ostraka.verify(tmp_path, all_steps=True, raises=False)._repr_html_())
    assert shown[shown.index("damaged") + 1] == "1"
    assert shown.count("intact") == 1
    assert "2 steps" in shown


def test_many_problems_are_cut():
    lost = LostBox("kernel", ((0, 2),), (4,))
    problems = tuple(Problem(f"shard_{n}", "lost", ("kernel",), (lost,)) for n in range(500))
    shown = texts_in(VerifyReport("a", 1, 500, 0, 0.0, problems)._repr_html_())
    assert "500 problems" in shown
    assert "… and 450 more" in shown


def test_text_is_cut_before_it_is_escaped():
    assert text("<" * 200) == "&lt;" * 120 + "…"
    assert text("a\x1b", 10) == r"a\x1b"
    assert html.size(1000) == "1000 B"
    assert html.size(1536) == "1.5 KiB (1,536 bytes)"
