"""The page of a checkpoint, in a real browser, and the document that it shows."""

import base64
import gzip
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import ostraka
from browser import (
    WIDTHS_PX,
    click,
    complaints,
    hover,
    is_wider_than_screen,
    open_page,
    type_text,
    wait_until,
)
from checkpoint_pages import (
    HOSTILE_NAMES,
    many_leaves,
    save_hostile,
    save_transformer,
    write_planned,
)
from cli_runs import as_json, flip, run
from hf_files import save_for_hugging_face
from orbax_cases import Form, make_arrays, make_local, mesh_of, write
from ostraka import integrity
from ostraka.layout.spec import LeafSpec, MeshSpec, holders
from ostraka.reading.locate import open_at
from ostraka.report.checkpoint import describe_checkpoint, describe_leaf, describe_leaf_at
from ostraka.report.page import render
from ostraka.report.schema import CheckpointDocument
from ostraka.tree.patterns import matches

MOST_PAGE_BYTES = 5 << 20
QUERY = "model/blocks/0/query/kernel"


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "1200"
    save_transformer(path, parity=2)
    return path


def write_page(document: CheckpointDocument, to: Path) -> str:
    """Write the page of a document. Returns its address."""
    page = render({"title": "a page", "at": 0.0, "documents": [document], "live": None})
    to.write_text(page, "utf-8")
    return to.as_uri()


@pytest.fixture(scope="module")
def page(transformer: Path, browser: Any) -> str:
    document = describe_checkpoint(transformer)
    return write_page(document, transformer.parent / "page.html")


@pytest.fixture
def opened(browser: Any, page: str) -> Any:
    visit(browser, page)
    return browser


def visit(browser: Any, address: str, width_px: int = WIDTHS_PX[0]) -> None:
    """Open a page at a width, and forget what earlier pages have said and requested."""
    complaints(browser, own="")
    browser.set_size(width_px, 900)
    open_page(browser, address)


def text_of(browser: Any, selector: str) -> str:
    return browser.run("return document.querySelector(arguments[0]).innerText", selector)


def figures_in(browser: Any) -> dict[str, str]:
    """The large numbers and the facts at the head of a page."""
    return browser.run(
        "const found = {};"
        "for (const one of document.querySelectorAll('.figure'))"
        " found[one.querySelector('span').textContent] = one.querySelector('b').textContent;"
        "for (const name of document.querySelectorAll('.ck-facts dt'))"
        " found[`fact ${name.textContent}`] = name.nextElementSibling.textContent;"
        "return found"
    )


def panel_facts(browser: Any) -> dict[str, str]:
    return browser.run(
        "return Object.fromEntries([...document.querySelectorAll('#leaf dt')]"
        ".map((name) => [name.textContent, name.nextElementSibling.textContent]))"
    )


def boxes_in(browser: Any) -> list[dict[str, Any]]:
    return browser.run("return document.querySelector('.ck-map').boxes()")


def crumbs_in(browser: Any) -> str:
    return browser.run(
        "return [...document.querySelectorAll('.ck-crumbs b, .ck-crumbs button')]"
        ".map((one) => one.textContent).join('/')"
    )


def click_map(browser: Any, path: str) -> None:
    """Click the name of a node in the map."""
    (box,) = [one for one in boxes_in(browser) if one["path"] == path]
    frame = browser.run(
        "const canvas = document.querySelector('.ck-map');"
        "canvas.scrollIntoView({block: 'center'});"
        "const {x, y} = canvas.getBoundingClientRect(); return [x, y]"
    )
    event = {"x": frame[0] + box["x"] + 6, "y": frame[1] + box["y"] + 6}
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        browser.command("Input.dispatchMouseEvent", {"type": kind, **event, **button})


def press(browser: Any, selector: str, *keys: str) -> None:
    browser.run("document.querySelector(arguments[0]).focus()", selector)
    for key in keys:
        for kind in ("keyDown", "keyUp"):
            browser.command("Input.dispatchKeyEvent", {"type": kind, "key": key})


def search(browser: Any, text: str) -> list[str]:
    """The names in the tree after a search, and the number of matches."""
    browser.run("document.querySelector('#search').value = ''")
    type_text(browser, "#search", text)
    return browser.run(
        "return [...document.querySelectorAll('.ck-name')].map((n) => n.textContent)"
    )


def pick(browser: Any, path: str) -> None:
    """Show a leaf in the panel, by searching for it."""
    assert path in search(browser, path)
    click(browser, f".ck-row[title='{path}']")
    assert text_of(browser, "#leaf .ck-path") == path


# The document


def test_document_agrees_with_show(transformer: Path):
    found = describe_checkpoint(transformer)
    shown = as_json("show", transformer)
    leaves = found["leaves"]
    assert leaves["path"] == [leaf["path"] for leaf in shown["leaves"]]
    assert leaves["bytes"] == [leaf.get("bytes", 0) for leaf in shown["leaves"]]
    totals = shown["totals"]
    assert found["totals"]["arrays"] == totals["arrays"]
    assert found["totals"]["bytes"] == totals["bytes"] == sum(leaves["bytes"])
    assert found["totals"]["stored_bytes"] == totals["file_bytes"]
    assert (found["devices"], found["processes"]) == (totals["devices"], totals["processes"])
    names = [file["file"] for file in shown["files"]]
    assert found["files"]["name"][: len(names)] == names
    assert found["files"]["bytes"][: len(names)] == [file["bytes"] for file in shown["files"]]
    assert (found["step"], found["metrics"]) == (1200, {"loss": 2.25})
    assert sum(found["groups"].values()) == sum(found["dtypes"].values()) == totals["bytes"]
    by_host = found["places"]["bytes"].values()
    assert sum(sum(names.values()) for names in by_host) == totals["bytes"]
    assert found["saved"]["blocked_s"] == shown["writer"]["timeline"]["blocked_s"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_statistics_agree_with_show(transformer: Path):
    found = describe_checkpoint(transformer)
    shown = as_json("show", transformer, "--stats")
    rows = {leaf["path"]: leaf["statistics"] for leaf in shown["leaves"] if "statistics" in leaf}
    assert len(rows) == found["values"]["arrays"] == found["totals"]["arrays"]
    for details in found["details"].values():
        values, expected = details["values"], rows[details["path"]]
        assert values is not None
        assert values["problem"] is None
        assert {name: values[name] for name in expected} == expected


def test_a_lost_file_does_not_change_what_parity_covers(transformer: Path, tmp_path: Path):
    # Other damage is in test_damage; here no warning may leak, since warnings are errors.
    copy = tmp_path / "1200"
    shutil.copytree(transformer, copy)
    min(copy.glob("shards-*/shard_*")).unlink()
    whole, found = describe_checkpoint(transformer), describe_checkpoint(copy)
    assert found["details"] == whole["details"]
    assert found["integrity"]["state"] == "damaged"
    assert found["integrity"]["restorable"] is True
    assert found["integrity"]["repair"] == f"ostraka repair {copy}"


CASES: dict[str, Any] = {
    "nan": np.array([[1.0, np.nan], [np.inf, -np.inf]], np.float32),
    "all nan": np.full(3, np.nan),
    "zeros": np.zeros((3, 4), np.int8),
    "one": np.float64(7.5),
    "empty": np.zeros((0, 3), np.float32),
    "bool": np.array([True, False, True]),
    "bfloat16": np.linspace(-3, 3, 1000).astype(ml_dtypes.bfloat16),
    "int4": np.arange(-8, 8).astype(ml_dtypes.int4),
    "uint64": np.array([0, 1 << 63], np.uint64),
    "complex": np.array([3 + 4j, 0], np.complex64),
    "widest": np.array([-1.7e308, 0.0, 1.7e308]),
    "deep": np.arange(2 * 3 * 20 * 30, dtype=np.int32).reshape(2, 3, 20, 30),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cases") / "c"
    large = np.random.default_rng(0).normal(size=(5 << 20)).astype(np.float32)
    ostraka.save(path, {**CASES, "large": large.reshape(5 << 10, 1 << 10)})
    return path


@pytest.mark.parametrize("name", [*CASES, "large"])
def test_values_are_those_of_numpy(cases: Path, name: str):
    values = describe_leaf_at(cases, name)["values"]
    assert values is not None
    array = np.asarray(ostraka.open(cases)[name][...])
    numbers = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    numbers = np.abs(numbers) if array.dtype.kind == "c" else numbers
    finite = numbers[np.isfinite(numbers)]
    counts = (numbers.size, np.isnan(numbers).sum(), np.isinf(numbers).sum(), (numbers == 0).sum())
    assert tuple(values[of] for of in ("count", "nan", "infinite", "zero")) == counts
    histogram = values["histogram"]
    if not finite.size:
        assert histogram is None
        assert values["mean"] is values["norm"] is None
        return
    assert histogram is not None
    assert sum(histogram["counts"]) == finite.size
    assert histogram["low"] <= finite.min() <= finite.max() <= histogram["high"]
    half = len(histogram["counts"]) // 2  # Halves, since the distance of the largest is infinite.
    middle = histogram["low"] / 2 + histogram["high"] / 2
    if name != "large" and not np.any(finite == middle):
        assert sum(histogram["counts"][:half]) == (finite < middle).sum()
    if name != "widest":  # whose squares are no numbers
        assert values["norm"] == pytest.approx(np.linalg.norm(finite), rel=1e-6)
        assert values["mean"] == pytest.approx(finite.mean(), rel=1e-6, abs=1e-12)


def test_integers_have_a_bin_each(cases: Path):
    values = describe_leaf_at(cases, "int4")["values"]
    assert values is not None
    assert values["histogram"] == {"low": -8.5, "high": 7.5, "counts": [1] * 16}


def test_first_elements_are_shown(cases: Path):
    def first(name: str) -> Any:
        values = describe_leaf_at(cases, name)["values"]
        return values and values["slice"]

    assert first("deep")["index"] == "[0, 0, :8, :8]"
    assert first("deep")["values"] == CASES["deep"][0, 0, :8, :8].tolist()
    assert first("nan")["values"] == [[1.0, "nan"], ["inf", "-inf"]]
    assert first("one") == {"index": "[()]", "shape": [], "values": 7.5}
    assert first("uint64")["values"] == [0, str(1 << 63)]
    assert first("complex")["values"] == ["3+4j", "0+0j"]
    large = ostraka.open(cases)["large"][:8, :8]
    assert np.allclose(first("large")["values"], large, rtol=1e-5)


def test_an_unknown_leaf_is_named(cases: Path):
    with pytest.raises(KeyError, match="has no array 'deeb'.*'deep'"):
        describe_leaf_at(cases, "deeb")


def test_slices_are_where_show_finds_them(transformer: Path):
    source = open_at(transformer)
    number = [leaf.path for leaf in source.saved.leaves].index(QUERY)
    found = describe_leaf(source, number, values=False)
    assert found["values"] is None
    files = [file.name for file in source.files()]
    expected = [
        ([list(span) for span in box.box], files.index(box.file), box.offset, box.nbytes)
        for box in source.boxes_of(number)
    ]
    assert expected == [
        (box["box"], box["file"], box["offset"], box["bytes"]) for box in found["boxes"]
    ]
    assert found["boxes_in_all"] == 8


def test_values_are_read_only_if_they_are_few_or_wanted(transformer: Path):
    found = describe_checkpoint(transformer, values=False)
    assert found["values"] == {
        "read": False,
        "arrays": 0,
        "command": f"ostraka report {transformer} --values",
    }
    assert all(details["values"] is None for details in found["details"].values())


def test_command_writes_the_page_and_prints_the_document(transformer: Path, tmp_path: Path):
    result = run("report", transformer, "-o", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    printed = as_json("report", transformer)
    assert printed["documents"] == [describe_checkpoint(transformer)]


# The page


def test_page_agrees_with_show(opened: Any, transformer: Path):
    shown = as_json("show", transformer)["totals"]
    lines = run("show", transformer).output
    found = figures_in(opened)
    assert found["arrays"] == f"{shown['arrays']:,}"
    assert found["shard and parity files"] == f"{shown['files']:,}"
    assert found["devices"] == f"{shown['devices']}"
    assert found["of arrays"] in lines
    assert f"{found['fact parameters']} parameters" in lines
    assert found["fact mesh"] == "fsdp=4, tp=2"
    assert found["fact metrics"] == "loss 2.25"
    assert found["fact saved"] in lines
    (tree,) = [box for box in boxes_in(opened) if box["path"] == "model"]
    rows = as_json("show", transformer)["leaves"]
    in_model = [row["bytes"] for row in rows if row["path"].startswith("model/")]
    assert tree["bytes"] == sum(in_model)
    assert text_of(opened, "#matches") == f"{len(rows)} leaves"


def test_page_is_quiet_and_fits_screens(browser: Any, page: str):
    for width in WIDTHS_PX:
        visit(browser, page, width)
        assert complaints(browser, own=page) == []
        assert not is_wider_than_screen(browser)
        for theme in ("auto", "light", "dark"):
            assert text_of(browser, "#theme") == f"Theme: {theme}"
            click(browser, "#theme")
        assert complaints(browser, own=page) == []


def test_map_zooms_by_pointer_and_keyboard(opened: Any):
    click_map(opened, "model")
    assert crumbs_in(opened) == "all/model"
    paths = {box["path"] for box in boxes_in(opened) if box["depth"] == 0}
    assert {path.rpartition("/")[0] if path.count("/") > 1 else path for path in paths} == {
        *("model/blocks", "model/embedding", "model/head")
    }
    click(opened, ".ck-crumbs button")
    assert crumbs_in(opened) == "all"
    press(opened, ".ck-map", "ArrowRight", "Enter")
    assert crumbs_in(opened) == "all/model"
    assert "model/" in text_of(opened, ".ck-status")
    press(opened, ".ck-map", "Escape")
    assert crumbs_in(opened) == "all"
    assert complaints(opened, own="file:") == []


def test_areas_are_bytes(opened: Any):
    top = [box for box in boxes_in(opened) if box["depth"] == 0]
    area, nbytes = sum(b["w"] * b["h"] for b in top), sum(b["bytes"] for b in top)
    for box in top:
        assert box["w"] * box["h"] / area == pytest.approx(box["bytes"] / nbytes, rel=1e-6)


@pytest.mark.parametrize(("number", "names"), [(2, {"float32", "uint32"}), (3, set())])
def test_map_shows_dtypes_and_hosts(opened: Any, transformer: Path, number: int, names: set[str]):
    click(opened, f".ck-tools .choice button:nth-of-type({number})")
    found = {box["path"] for box in boxes_in(opened) if box["depth"] == 0 and not box["rest"]}
    hosts = set(describe_checkpoint(transformer, values=False)["hosts"])
    assert found & (names or hosts)


def test_hovering_the_map_explains(opened: Any):
    click_map(opened, "model")
    click(opened, ".ck-crumbs button")
    hover(opened, ".ck-map")
    wait_until(opened, "!document.querySelector('#tip').hidden")
    assert "of all" in text_of(opened, "#tip")


def test_search_by_text_and_by_pattern(opened: Any, transformer: Path):
    paths = describe_checkpoint(transformer, values=False)["leaves"]["path"]
    patterns = ("model/**/kernel", "model/blocks/*/up", "**/up/k?rnel", "**/bias", "m*/**")
    patterns += ("optimizer/**/blocks/?/up/*", "**", "*", "x?")
    counts = {pattern: sum(matches(pattern, path) for path in paths) for pattern in patterns}
    assert (counts["model/**/kernel"], counts["model/blocks/*/up"], counts["x?"]) == (9, 4, 0)
    for text, count in {"QUERY": 6, **counts}.items():
        search(opened, text)
        assert text_of(opened, "#matches").startswith(f"{count} lea"), text


def test_tree_opens_by_keyboard(opened: Any):
    press(opened, "#tree", "Home", "ArrowDown", "Enter")
    names = "[...document.querySelectorAll('.ck-name')].map((one) => one.textContent)"
    before = opened.run(f"return {names}")
    press(opened, "#tree", "Home", "ArrowLeft")
    after = opened.run(f"return {names}")
    assert len(after) < len(before)
    press(opened, "#tree", "ArrowRight")
    assert len(opened.run(f"return {names}")) > len(after)


def test_panel_shows_an_array(opened: Any, transformer: Path):
    pick(opened, QUERY)
    facts = panel_facts(opened)
    leaf = as_json("show", transformer, QUERY, "--stats")
    assert facts["dtype"] == "float32"
    assert facts["shape"] == "32 × 32"
    assert facts["group"] == "parameters"
    statistics = leaf["statistics"]
    assert float(facts["least"]) == pytest.approx(statistics["least"], rel=1e-5)
    assert float(facts["std"]) == pytest.approx(statistics["std"], rel=1e-5)
    assert facts["NaN"] == "0"
    assert opened.run("return document.querySelectorAll('#boxes tbody tr').length") == 8
    bins = opened.run("return document.querySelectorAll('#histogram .ck-bin').length")
    assert bins == 40
    hover(opened, "#histogram .ck-bin:nth-of-type(20)")
    wait_until(opened, "!document.querySelector('#tip').hidden")
    assert "element" in text_of(opened, "#tip")
    click(opened, "#histogram button:nth-of-type(2)")
    assert opened.run("return document.querySelectorAll('#histogram .ck-bin').length") == 40


def test_picture_has_the_devices_of_each_shard(opened: Any, transformer: Path):
    source = open_at(transformer)
    for leaf in source.saved.leaves:
        if leaf.path in (QUERY, "model/blocks/0/down/kernel", "model/embedding/embedding"):
            pick(opened, leaf.path)
            mesh = source.saved.meshes[leaf.mesh]
            expected = holders(mesh, leaf.partition, len(leaf.shape)).tolist()
            shown = opened.run(
                "return [...document.querySelectorAll('.ck-shard text')]"
                ".map((one) => one.textContent)"
            )
            assert [list(map(int, one.split())) for one in shown] == expected, leaf.path


def test_arrays_with_nan_are_listed_and_lead_to_the_panel(opened: Any):
    assert "spoiled" in text_of(opened, "#attention")
    assert "1 NaN, 1 infinite of 4" in text_of(opened, "#attention")
    click(opened, "#attention tr.pick")
    assert text_of(opened, "#leaf .ck-path") == "spoiled"
    assert panel_facts(opened)["NaN"] == "1 (25 %)"


def test_buttons_copy_the_path_and_the_python_line(opened: Any, transformer: Path):
    pick(opened, QUERY)
    opened.run(
        "window.copied = []; document.execCommand = () => { window.copied.push(document"
        ".activeElement.value); return true; };"
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText: (text) => {"
        " window.copied.push(text); return Promise.resolve(); }}})"
    )
    click(opened, ".ck-buttons button:nth-of-type(1)")
    click(opened, ".ck-buttons button:nth-of-type(2)")
    wait_until(opened, "window.copied.length === 2")
    path, line = opened.run("return window.copied")
    assert path == QUERY
    assert line == f'ostraka.open("{transformer}")["{QUERY}"]'
    assert eval(line).shape == (32, 32)


def test_save_shows_its_phases(opened: Any, transformer: Path):
    shown = text_of(opened, "#save")
    timeline = ostraka.open(transformer).writer["timeline"]
    for phase in ("capture", "agree", "plan", "write", "parity"):
        assert f"{phase} " in shown
    assert (
        f"{timeline['blocked_s'] * 1000:.0f} ms" in shown
        or f"{timeline['blocked_s']:.1f} s" in shown
    )
    assert "the loop waited" in shown


# Damage


def damage(path: Path, at: int) -> tuple[Path, Path]:
    """Flip a byte of the first shard file and lose another one. Returns both."""
    flipped, *_, lost = sorted(path.glob("shards-*/shard_*"))
    data = bytearray(flipped.read_bytes())
    data[at] ^= 1
    flipped.write_bytes(data)
    lost.unlink()
    return flipped, lost


@pytest.mark.parametrize(
    ("parity", "at", "is_covered"),
    # The last byte of the first file is beyond the end of the others: nothing else is lost there.
    [(0, 5000, False), (1, 5000, False), (1, -1, True), (2, 5000, True)],
)
def test_damage(tmp_path: Path, browser: Any, parity: int, at: int, is_covered: bool):
    path = tmp_path / "7"
    array = np.arange(64 << 10, dtype=np.float32).reshape(64, -1)
    sharded = jax.device_put(array, jax.NamedSharding(mesh_of(x=8), jax.P("x")))
    # The first file has more than the others, in a block of its own.
    more = jax.device_put(np.ones(2 << 20, np.int8), jax.devices()[0])
    ostraka.save(path, {"w": sharded, "x": more}, parity=parity)
    flipped, lost = damage(path, at)
    seen = describe_checkpoint(path, verified=True)
    states = dict(
        zip(
            seen["files"]["name"],
            (seen["files"]["state"]["texts"][n] for n in seen["files"]["state"]["codes"]),
            strict=True,
        )
    )
    name = f"{lost.parent.name}/{lost.name}"
    assert states[name] == "missing"
    assert states[f"{flipped.parent.name}/{flipped.name}"] == "damaged"
    assert [*states.values()].count("verified") == len(states) - 2
    can_repair = integrity.repair(path, dry_run=True, raises=False).ok
    assert seen["integrity"]["restorable"] is can_repair is is_covered
    other = "" if can_repair else " --from OTHER_COPY"
    assert seen["integrity"]["repair"] == f"ostraka repair {path}{other}"
    values = {found["path"]: found["values"] for found in seen["details"].values()}
    assert values["w"] is not None
    assert (values["w"]["problem"] is None) is can_repair
    address = write_page(seen, tmp_path / "page.html")
    visit(browser, address)
    assert str(seen["integrity"]["repair"]) in text_of(browser, "#files")
    assert lost.name in text_of(browser, "#files .ck-problems")
    hover(browser, ".ck-file.missing")
    wait_until(browser, "!document.querySelector('#tip').hidden")
    assert lost.name in text_of(browser, "#tip")
    assert "it is missing" in text_of(browser, "#tip")
    if parity:
        assert "2 lost or damaged" in text_of(browser, ".ck-parity")
    if not can_repair:
        click(browser, "#attention tr.pick")
        assert "is damaged" in text_of(browser, "#leaf .notice.bad")
    assert complaints(browser, own=address) == []


def test_without_verify_a_listing_tells_of_lost_files(tmp_path: Path):
    path = tmp_path / "7"
    ostraka.save(path, {"w": np.arange(5)})
    assert describe_checkpoint(path)["integrity"]["state"] == "committed"
    flip(path)
    assert describe_checkpoint(path, values=False)["integrity"]["state"] == "committed"
    shard = min(path.glob("shards-*/shard_*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    found = describe_checkpoint(path, values=False)
    assert found["integrity"]["state"] == "damaged"
    assert "bytes where" in found["integrity"]["problems"][0]


# Other formats


def test_orbax(tmp_path: Path, browser: Any):
    mesh = mesh_of(x=4, y=2)
    tree = {"arrays": make_arrays(mesh), "local": make_local()}
    path = write(Form("step", False, True, True), tmp_path / "orbax", tree)
    found = describe_checkpoint(path, verified=True)
    assert (found["format"], found["integrity"]["has_checksums"]) == ("orbax", False)
    shown = as_json("show", path)
    assert found["leaves"]["path"] == [leaf["path"] for leaf in shown["leaves"]]
    assert found["totals"]["bytes"] == shown["totals"]["bytes"]
    assert all(one["values"] and not one["values"]["problem"] for one in found["details"].values())
    address = write_page(found, tmp_path / "page.html")
    for width in WIDTHS_PX:
        visit(browser, address, width)
        assert not is_wider_than_screen(browser)
    assert "Orbax" in figures_in(browser)["fact format"]
    assert "no checksums" in text_of(browser, "#files")
    assert complaints(browser, own=address) == []


@pytest.mark.parametrize("names", [None, "hf"])
def test_hugging_face(tmp_path: Path, browser: Any, names: str | None):
    arrays = save_for_hugging_face(tmp_path / "model")
    found = describe_checkpoint(tmp_path / "model", names=names)
    assert found["format"] == "safetensors"
    assert found["totals"]["bytes"] == sum(array.nbytes for array in arrays.values())
    address = write_page(found, tmp_path / "page.html")
    visit(browser, address)
    if names is None:
        assert set(found["leaves"]["path"]) == set(arrays)
        assert set(found["places"]["bytes"]) == {
            f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
        }
        name = "model.layers.0.mlp.up_proj.weight"
        click_map(browser, "model/layers")
        assert crumbs_in(browser) == "all/model/layers"
        pick(browser, name)
        finite = arrays[name][np.isfinite(arrays[name])].astype(np.float64)
        found_norm = float(panel_facts(browser)["norm"].replace(",", ""))
        assert found_norm == pytest.approx(np.linalg.norm(finite), rel=1e-4)
    assert complaints(browser, own=address) == []


# Untrusted and very large ones


def test_hostile_names_are_text(tmp_path: Path, browser: Any):
    path = tmp_path / "hostile <b>"
    save_hostile(path)
    found = describe_checkpoint(path)
    address = write_page(found, tmp_path / "page.html")
    for width in WIDTHS_PX:
        visit(browser, address, width)
        assert not is_wider_than_screen(browser)
    odd = "return document.querySelectorAll('#page img, #page script, #page b b').length"
    assert browser.run(odd) == 0
    leaves = found["leaves"]
    shapes = {
        name: shape
        for name, shape in zip(leaves["path"], leaves["shape"], strict=True)
        if shape is not None
    }
    assert len(shapes) == len(HOSTILE_NAMES)
    for name, shape in shapes.items():
        browser.run(
            "const input = document.querySelector('#search');"
            "input.value = 'a/'; input.dispatchEvent(new Event('input'));"
            "const rows = [...document.querySelectorAll('.ck-row')];"
            "rows.find((one) => one.title === arguments[0]).click()",
            name,
        )
        assert not is_wider_than_screen(browser)
        # The Python line of any name opens it.
        line = browser.run("return document.querySelectorAll('.ck-buttons button')[1].title")
        assert eval(line).shape == tuple(shape), line
    for number in (1, 2, 3):
        click(browser, f".ck-tools .choice button:nth-of-type({number})")
        hover(browser, ".ck-map")
    assert browser.run("return document.querySelectorAll('#page img, #page script').length") == 0
    assert "<b>x</b>" in text_of(browser, "#tree") or search(browser, "<b>")
    assert complaints(browser, own=address) == []


def measure_opening(browser: Any, address: str) -> float:
    begin = time.perf_counter()
    visit(browser, address)
    return time.perf_counter() - begin


@pytest.mark.parametrize("count", [20_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_very_many_leaves(
    tmp_path: Path, browser: Any, record_property: Callable[..., None], count: int
):
    write_planned(
        tmp_path / "c", many_leaves(count), MeshSpec(("x",), (8,), tuple(range(8))), per_process=8
    )
    found = describe_checkpoint(tmp_path / "c", values=False)
    assert found["totals"]["arrays"] == count
    address = write_page(found, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < MOST_PAGE_BYTES * count // 100_000
    text = (tmp_path / "page.html").read_text()
    packed = text.partition('<script type="application/gzip" id="data">')[2].partition("<")[0]
    assert json.loads(gzip.decompress(base64.b64decode(packed)))["documents"] == [found]
    record_property("seconds to open", measure_opening(browser, address))
    assert text_of(browser, "#matches") == f"{count:,} leaves"
    assert browser.run("return document.querySelectorAll('*').length") < 5000
    search(browser, "**/1999/**/kernel")
    assert text_of(browser, "#matches") == f"5 leaves of {count:,}"
    assert len(boxes_in(browser)) < 20_000
    groups = [box for box in boxes_in(browser) if box["rest"]]
    assert groups or count < 100_000  # Boxes that are too small to see are gathered.
    for group in groups[:1]:
        click_map(browser, group["path"])
        assert sum(box["bytes"] for box in boxes_in(browser) if not box["depth"]) == group["bytes"]
    assert complaints(browser, own=address) == []


def test_16_384_devices(tmp_path: Path, browser: Any, record_property: Callable[..., None]):
    mesh = MeshSpec(("data", "model"), (2048, 8), tuple(range(16_384)))
    leaves = [
        LeafSpec(f"model/layers/{n}/kernel", "jax", "bfloat16", (16_384, 16_384), 0, partition)
        for n in range(30)
        for partition in [((("data",), ("model",)), (("model",), ("data",)), ())[n % 3]]
    ]
    write_planned(tmp_path / "c", leaves, mesh, per_process=8, lost=3)
    found = describe_checkpoint(tmp_path / "c")
    assert (found["devices"], found["processes"]) == (16_384, 2048)
    assert not found["values"]["read"]
    assert found["integrity"]["problems"] != []
    address = write_page(found, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < MOST_PAGE_BYTES
    record_property("seconds to open", measure_opening(browser, address))
    assert figures_in(browser)["devices"] == "16,384"
    assert browser.run("return document.querySelectorAll('*').length") < 8000
    assert len(browser.run("return [...document.querySelectorAll('.ck-file.missing')]")) == 1
    pick(browser, "model/layers/0/kernel")
    cells = browser.run("return document.querySelectorAll('.ck-shard').length")
    assert cells == 32 * 8
    assert str(found["values"]["command"]) in text_of(browser, "#leaf .notice")
    assert complaints(browser, own=address) == []
