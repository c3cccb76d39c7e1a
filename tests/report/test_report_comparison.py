"""Comparisons of checkpoints and along runs: norms, layers, flags, and the page that shows them."""

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
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
from cli_runs import as_json, run
from finetuned import EXPLODING, FROZEN, NAN, finetune
from ostraka.report import comparison
from ostraka.report._flags import Candidate, by_layer, find_flags
from ostraka.report._layers import places_of
from ostraka.report.compare import Norms
from ostraka.report.comparison import describe_changes, describe_comparison
from ostraka.report.page import render
from ostraka.report.schema import ComparisonDocument

LAYERS = {"nan": NAN, "exploding": EXPLODING, "frozen": FROZEN}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A healthy fine-tuning, and one with faults."""
    root = tmp_path_factory.mktemp("runs")
    return {name: finetune(root / name, faults=name == "faulty") for name in ("healthy", "faulty")}


@pytest.fixture(scope="module")
def changes(runs: dict[str, Path]) -> dict[str, ComparisonDocument]:
    """The documents of both."""
    return {name: describe_changes(run) for name, run in runs.items()}


def paths_of(found: ComparisonDocument) -> list[str]:
    table = found["leaves"]
    rows = zip(table["layer"]["codes"], table["name"]["codes"], strict=True)
    names = ((table["layer"]["texts"][a], table["name"]["texts"][b]) for a, b in rows)
    return [f"{layer}{found['separator']}{name}" if name else layer for layer, name in names]


def column(found: ComparisonDocument, name: str) -> dict[str, Any]:
    """A column of the table, by path."""
    values: Any = found["leaves"][name]  # type: ignore[literal-required]
    if isinstance(values, dict) and "codes" in values:
        values = [None if code < 0 else values["texts"][code] for code in values["codes"]]
    return dict(zip(paths_of(found), values, strict=True))


def differ(directory: Path, a: Any, b: Any) -> ComparisonDocument:
    ostraka.save(directory / "a", a)
    ostraka.save(directory / "b", b)
    return describe_comparison(directory / "a", directory / "b")


def show(browser: Any, directory: Path, *documents: Any) -> Path:
    """Write the page of some documents, and open it."""
    file = directory / "page.html"
    page: Any = {"title": "t", "at": 0.0, "documents": documents, "live": None}
    file.write_text(render(page), "utf-8")
    open_page(browser, file.as_uri())
    return file


# Numbers


def test_norms_are_those_of_numpy(tmp_path: Path):
    random = np.random.default_rng(0)
    a = random.normal(size=(300, 500)).astype(np.float32)
    b = (a + random.normal(size=a.shape) / 100).astype(ml_dtypes.bfloat16)
    found = differ(tmp_path, {"w": a, "n": np.arange(4)}, {"w": b, "n": np.arange(4) + 1})
    x, y = a.astype(np.float64), b.astype(np.float64)
    for name, values in (("norm_a", x), ("norm_b", y), ("norm_delta", y - x)):
        assert column(found, name)["w"] == pytest.approx(np.linalg.norm(values), rel=1e-3)
        assert column(found, name)["n"] is None
    assert column(found, "equal") == {"w": int((x == y).sum()), "n": 0}


def test_equal_infinities_and_nan_are_no_change(tmp_path: Path):
    mask = np.array([0.0, -np.inf, np.nan])
    found = differ(tmp_path, {"mask": mask, "w": np.ones(4)}, {"mask": mask, "w": np.full(4, 2.0)})
    assert column(found, "norm_delta") == {"mask": 0.0, "w": 2.0}
    assert column(found, "norm_a")["mask"] == "nan"
    assert found["leaves"]["nan"] == {"0": 2}


def test_keys_counts_and_values_have_no_norm_and_no_flag(tmp_path: Path):
    tree = {"key": jnp.asarray([1, 2], jnp.uint32), "count": jnp.asarray(3), "rate": 0.5}
    trees = [{**tree, "w": jnp.full((4, 4), n)} for n in (1.0, 1.01)]
    found = differ(tmp_path, *trees)
    assert column(found, "norm_a") == {"key": None, "count": None, "rate": None, "w": 4.0}
    assert found["flags"] == []


# Layers and roles


@pytest.mark.parametrize(
    ("path", "layer", "role"),
    [
        ("model/blocks/10/attn/query/kernel", "model/blocks/10", "q"),
        ("model/blocks/2/mlp/gate/kernel", "model/blocks/2", "gate"),
        ("model/blocks/2/norm/bias", "model/blocks/2", "norm"),
        ("model/embed/embedding", "model/embed", "embedding"),
        ("optimizer/opt_state/0/mu/blocks/2/attn/query/kernel", None, "q"),
        ("optimizer/opt_state/0/mu/embed/embedding", "optimizer/opt_state/0/mu/embed", "embedding"),
        ("params/Block_1/Dense_0/kernel", "params/Block_1", "weight"),
        ("stages/0/blocks/1/conv/weight", "stages/0/blocks/1", "weight"),
        ("layers/0/weight", "layers/0", "weight"),
    ],
)
def test_place_of_a_leaf(path: str, layer: str | None, role: str):
    numbers = [n for n, name in enumerate(path.split("/")) if any(map(str.isdigit, name))]
    paths = {path: (4, 4)}
    for at in numbers:  # the other blocks
        names = path.split("/")
        names[at] = names[at].translate(str.maketrans("0123456789", "1234567890"))
        paths["/".join(names)] = (4, 4)
    paths |= {"model/blocks/0/attn/query/kernel": (4, 4), "optimizer/opt_state/0/count": ()}
    paths |= {"model/blocks/1/attn/query/kernel": (4, 4), "optimizer/step": ()}
    paths |= {f"optimizer/opt_state/0/mu/blocks/{n}/attn/query/kernel": (4, 4) for n in range(3)}
    places, _, _ = places_of(paths)
    wanted = layer or path.removesuffix("/attn/query/kernel")
    assert (places[path].layer, places[path].role) == (wanted, role)
    assert path == f"{places[path].layer}/{places[path].name}"


def test_layers_of_hugging_face_names_are_in_the_order_of_the_model():
    names = ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.experts.0.down_proj"]
    paths = ["lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"]
    paths += [f"model.layers.{n}.{name}.weight" for n in (0, 1, 10, 2) for name in names]
    places, layers, separator = places_of(dict.fromkeys(paths, (4, 4)))
    blocks = [f"model.layers.{n}" for n in (0, 1, 2, 10)]
    assert layers == ["model.embed_tokens", *blocks, "lm_head", "model.norm"]
    assert separator == "."
    roles = [places[f"model.layers.0.{name}.weight"].role for name in names]
    assert roles == ["q", "o", "up", "down"]


# Flags


def leaf(path: str, a: float, b: float, delta: float, *, size: int = 100, **counts: Any) -> Any:
    norms = Norms(a * a, b * b, delta * delta, **counts)
    return Candidate(path, path.rpartition("/")[0], size, norms, True)


USUAL = [leaf(f"m/{n}/kernel", 10, 10.01, 0.1) for n in range(8)]


@pytest.mark.parametrize(
    ("odd", "flag", "why"),
    [
        (leaf("x/w", 10, float("nan"), float("nan"), nan_b=3), "nan", "has 3 NaN of 100 elements"),
        (leaf("x/w", 10, 10, 0.1, infinite_a=1, infinite_b=1), None, ""),
        (leaf("x/w", 10, 500, 495), "exploding", "grew to 50 times its norm"),
        (leaf("x/w", 10, 40, 38), "exploding", "the median parameter changed by 0.01 of its norm"),
        (leaf("x/w", 10, 13, 8), None, "turned, but hardly grew"),
        (leaf("x/w", 0.01, 1, 1), None, "a bias that began near zero"),
        (leaf("x/w", 0, 5, 5), None, "new"),
        (leaf("x/w", 0, 500, 500), None, "new"),
        (leaf("x/w", 10, 0, 10), "dead", "shrank to 0 of its norm"),
        (leaf("x/w", 10, 1, 9), None, "smaller, but not dead"),
        (leaf("x/w", 10, 10, 0), "frozen", "did not change, while 8 of 9 parameters changed"),
        (leaf("x/w", 0, 0, 0), "frozen", "did not change and is all zero"),
        (leaf("x/w", 0, 0, 0, size=0), None, "no elements"),
    ],
)
def test_flag_of_a_parameter(odd: Any, flag: str | None, why: str):
    found = find_flags([*USUAL, odd])
    if flag is None:
        assert found == {}
    else:
        assert {path: kind for path, (kind, _) in found.items()} == {"x/w": flag}
        assert why in found["x/w"][1]
        (shown,) = by_layer(found, [*USUAL, odd])
        assert (shown["layer"], shown["leaves"]) == ("x", 1)


def test_a_frozen_backbone_is_no_fault():
    still = [leaf(f"m/{n}/kernel", 10, 10, 0) for n in range(9)]
    assert find_flags([*still, leaf("head/kernel", 10, 10, 0.1)]) == {}


def test_a_healthy_run_has_no_flag(changes: dict[str, ComparisonDocument]):
    found = changes["healthy"]
    assert found["flags"] == []
    assert found["along"] is not None
    assert found["along"]["flags"] == []
    assert found["along"]["pairs"] == [[0, 2], [2, 4], [4, 6]]
    assert found["moved"][0] == found["moved"][1] > 50


def test_planted_faults_are_found(changes: dict[str, ComparisonDocument]):
    found = changes["faulty"]
    layers = {flag["flag"]: flag["layer"] for flag in found["flags"]}
    assert layers == {kind: f"model/blocks/{number}" for kind, number in LAYERS.items()}
    assert found["along"] is not None
    steps = {flag["flag"]: flag["steps"] for flag in found["along"]["flags"]}
    assert steps == {"nan": [4, 6], "exploding": [0, 2], "frozen": [0, 2]}


# Along a run


def test_along_a_run_is_what_pairs_say(
    runs: dict[str, Path], changes: dict[str, ComparisonDocument]
):
    along = changes["healthy"]["along"]
    assert along is not None
    found = describe_comparison(runs["healthy"] / "2", runs["healthy"] / "4")
    layer, role = column(found, "layer"), column(found, "role")
    a, delta = column(found, "norm_a"), column(found, "norm_delta")
    for number, name in enumerate(along["layers"]):
        some = [path for path in a if layer[path] == name and a[path] is not None]
        wanted = np.sqrt(sum(delta[p] ** 2 for p in some) / sum(a[p] ** 2 for p in some))
        assert along["relative"][number][1] == pytest.approx(wanted, rel=2e-3)
    place = along["cells"].index(
        [along["layers"].index("model/blocks/0"), along["roles"].index("q")]
    )
    (path,) = (p for p in a if layer[p] == "model/blocks/0" and role[p] == "q")
    assert along["by_role"][place][1] == pytest.approx(delta[path] / a[path], rel=2e-3)


def test_steps_deleted_meanwhile_are_left_out(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = shutil.copytree(runs["healthy"], tmp_path / "run")
    measure = comparison.measure_norms

    def measure_and_delete(a: Any, b: Any, *rest: Any) -> Any:
        if a.location.endswith("/0"):
            shutil.rmtree(run / "4")
        return measure(a, b, *rest)

    monkeypatch.setattr(comparison, "measure_norms", measure_and_delete)
    found = describe_changes(run)
    assert found["along"] is not None
    assert found["along"]["pairs"] == [[0, 2], [2, 6]]
    assert found["notes"] == ["step 4 is left out: it was deleted meanwhile"]


def test_many_steps_are_chosen_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(comparison, "_MOST_PAIRS", 3)
    for step in range(10):
        ostraka.save(tmp_path / str(step), {"w": np.full(8, 1.0 + step)})
    found = describe_changes(tmp_path)
    assert found["along"] is not None
    assert found["along"]["pairs"] == [[0, 3], [3, 6], [6, 9]]
    assert found["notes"][0].startswith("4 of 10 steps are shown, evenly chosen")


def test_one_step_is_no_run_to_compare(tmp_path: Path):
    ostraka.save(tmp_path / "1", {"w": np.ones(3)})
    with pytest.raises(ostraka.errors.CheckpointNotFound, match="has 1 readable step; a compar"):
        describe_changes(tmp_path)


# The command


def test_report_prints_what_diff_prints(runs: dict[str, Path], tmp_path: Path):
    pair = [runs["faulty"] / step for step in ("0", "6")]
    (found,) = as_json("report", "--compare", *pair)["documents"]
    diff = as_json("diff", *pair)
    assert paths_of(found) == [one["path"] for one in diff["leaves"]]
    assert found["same"] == diff["same"]
    equal, shape = column(found, "equal"), column(found, "shape")
    for one in diff["leaves"]:
        if one["elements"] is not None:
            assert equal[one["path"]] == one["elements"]["count"] - one["elements"]["changed"]
            assert shape[one["path"]] == (" × ".join(map(str, one["a"]["shape"])) or "()")
    result = run("report", "--compare", *pair, "-o", tmp_path / "p.html")
    assert result.exit_code == 0, result.output
    assert "model/blocks/0" in (tmp_path / "p.html").read_text("utf-8")


# The page


def test_faults_are_seen_without_scrolling(
    browser: Any, changes: dict[str, ComparisonDocument], tmp_path: Path
):
    browser.set_size(1440, 900)
    show(browser, tmp_path, changes["faulty"])
    cards = browser.run(
        "return [...document.querySelectorAll('.flag')].map(e => {"
        "const b = e.getBoundingClientRect();"
        "return [e.className, e.innerText, b.top, b.bottom, b.right]})"
    )
    assert not is_wider_than_screen(browser)
    browser.set_size(WIDTHS_PX[1], 900)
    assert not is_wider_than_screen(browser)
    browser.set_size(1440, 900)
    assert [name.split()[-1] for name, *_ in cards] == [*LAYERS]
    for (name, text, top, bottom, right), number in zip(cards, LAYERS.values(), strict=True):
        assert f"model/blocks/{number}" in text, name
        assert 0 <= top < bottom <= 900
        assert right <= 1440
    assert complaints(browser, own="file://") == []


def test_a_healthy_page_says_so(
    browser: Any, changes: dict[str, ComparisonDocument], tmp_path: Path
):
    show(browser, tmp_path, changes["healthy"])
    assert browser.run("return document.querySelectorAll('.flag, td.flagged').length") == 0
    assert "Nothing stands out" in browser.run("return document.querySelector('#flags').innerText")


def test_cells_are_explained_and_list_their_leaves(
    browser: Any, changes: dict[str, ComparisonDocument], tmp_path: Path
):
    found = changes["faulty"]
    show(browser, tmp_path, found)
    table = found["leaves"]
    row = paths_of(found).index("model/blocks/2/up/kernel")
    layer, role = table["layer"]["codes"][row], table["role"]["codes"][row]
    cell = f'td[data-layer="{layer}"][data-role="{role}"]'
    hover(browser, cell)
    tip = wait_until(browser, "document.querySelector('#tip:not([hidden])')?.innerText")
    norm_a, norm_delta = table["norm_a"][row], table["norm_delta"][row]
    assert isinstance(norm_a, float)
    assert isinstance(norm_delta, float)
    assert f"‖b − a‖ {norm_delta:.4g}" in tip
    assert f"relative change {norm_delta / norm_a:.3g}, Exploding" in tip
    click(browser, cell)
    listed = wait_until(browser, "document.querySelector('.picked-leaves').innerText")
    assert "model/blocks/2/up/kernel" in listed
    assert browser.run(
        f"return document.querySelector('{cell} svg').getAttribute('aria-label')"
    ) == ("Exploding")


def test_keys_move_in_the_map_and_pick(
    browser: Any, changes: dict[str, ComparisonDocument], tmp_path: Path
):
    show(browser, tmp_path, changes["healthy"])
    browser.run("document.querySelector('.heat td[tabindex=\"0\"]').focus()")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowDown", "Enter"):
        for kind in ("rawKeyDown", "keyUp"):
            codes = {"Enter": 13, "ArrowRight": 39, "ArrowDown": 40}
            event = {"type": kind, "key": key, "windowsVirtualKeyCode": codes[key]}
            browser.command("Input.dispatchKeyEvent", event)
    label = browser.run("return document.activeElement.getAttribute('aria-label')")
    picked = browser.run("return document.querySelector('.picked-leaves').innerText")
    assert label.startswith("model/")
    assert label.split(", ")[0] in picked


def test_search_groups_and_theme(
    browser: Any, changes: dict[str, ComparisonDocument], tmp_path: Path
):
    found = changes["healthy"]
    show(browser, tmp_path, found)
    type_text(browser, "#leaf-search", "blocks/1 gate")
    wanted = [p for p in paths_of(found) if p.startswith("model/blocks/1/gate")]
    cells = "[...document.querySelectorAll('.card:last-child tbody tr td:first-child')]"
    listed = wait_until(browser, f"{cells}.map(e => e.innerText)")
    assert sorted(listed) == sorted(wanted)
    buttons = "[...document.querySelectorAll('.choice button')]"
    browser.run(f"{buttons}.find(e => e.innerText === 'optimizer').click()")
    rows = browser.run("return document.querySelector('.heat tbody').innerText")
    assert "/mu/blocks/1" in rows
    before = browser.run("return getComputedStyle(document.body).backgroundColor")
    for _ in range(2):
        click(browser, "#theme")
    assert browser.run("return document.documentElement.dataset.theme") == "dark"
    assert browser.run("return getComputedStyle(document.body).backgroundColor") != before
    click(browser, "#theme")


def test_paper_has_all_columns_with_their_names(
    browser: Any, changes: dict[str, ComparisonDocument], tmp_path: Path
):
    browser.set_size(760, 900)
    show(browser, tmp_path, changes["faulty"])
    browser.command("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        names = browser.run("return document.querySelector('.card:last-child thead').innerText")
        assert names.split()[0] == "leaf"
        assert "relative" in names
        assert not is_wider_than_screen(browser)
    finally:
        browser.command("Emulation.setEmulatedMedia", {"media": ""})
        browser.set_size(1440, 900)


def test_hostile_names_are_text(browser: Any, tmp_path: Path):
    name = "<img src=x onerror=alert(1)>\u202e</script><b>"
    trees = [{name: np.full((2, 2), n), "y": {name: np.ones(2)}} for n in (1.0, np.nan)]
    show(browser, tmp_path, differ(tmp_path, *trees))
    assert browser.run("return document.querySelectorAll('img, b > b, main script').length") == 0
    shown = browser.run("return document.body.innerText")
    assert "<img src=x onerror=alert(1)>\\u202e<~1script><b>" in shown
    assert complaints(browser, own="file://") == []


def test_many_leaves_stay_small(browser: Any, tmp_path: Path):
    blocks = {
        n: {k: {"kernel": np.zeros((2, 2)), "bias": np.zeros(2)} for k in ("query", "key", "up")}
        for n in range(1000)
    }
    ostraka.save(tmp_path / "a", {"blocks": blocks})
    found = describe_comparison(tmp_path / "a", tmp_path / "a")
    file = show(browser, tmp_path, found)
    data = file.stat().st_size - len(
        render({"title": "t", "at": 0.0, "documents": [], "live": None})
    )
    assert data / 6000 < 50  # 100,000 leaves take less than 5 MB
    assert len(browser.run("return [...document.querySelectorAll('.heat tbody tr')]")) == 300
    button = (
        "[...document.querySelectorAll('button')].find(e => e.innerText.startsWith('Show all'))"
    )
    browser.run(f"{button}.click()")
    assert browser.run("return document.querySelectorAll('.heat tbody tr').length") == 1000
