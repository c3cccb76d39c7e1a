"""The same numbers on the page, in the terminal and in `--json`, for each kind of page."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import numpy as np
import pytest

import ostraka
from browser import complaints, open_page
from cli_runs import as_json, run
from ostraka.report import schema
from runs import damage

RATES = ("--write-bandwidth", "3GB/s", "--read-bandwidth", "5GB/s", "--device-bandwidth", "30GB/s")
PLAN = ("plan", "gpt2", "--mesh", "data=8", "--optimizer", "adamw", *RATES, "--mtbf", "4h")


def tree(step: int) -> dict[str, Any]:
    layers = {n: {"kernel": np.full((60, 50), float(step + n), np.float32)} for n in range(3)}
    layers[1]["kernel"][:] = 1.0  # frozen
    moments = {n: {"kernel": 2 * layer["kernel"]} for n, layer in layers.items()}
    return {"params": {"layers": layers}, "opt_state": {"mu": moments}, "step": step}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "a"
    with ostraka.Manager(path, keep=4, keep_best="loss", asynchronous=False) as manager:
        for step in range(1, 7):
            metrics = {"loss": 3e-6 / step, "gain": float("nan") if step == 4 else step / 7}
            manager.save(step, tree(step), metrics=metrics)
    damage(path, 4)
    return path


def look(browser: Any, tmp_path: Path, *command: Any) -> tuple[dict[str, str], list[list[str]]]:
    """Write a page, open it, and return its large numbers and facts by name, and its table rows."""
    file, option = tmp_path / "page.html", "--report" if command[0] == "plan" else "-o"
    result = run(*command, option, file)
    assert result.exit_code == 0, result.output
    open_page(browser, file.as_uri())
    assert complaints(browser, own=file.as_uri()) == []
    figures = browser.run(
        "const text = (one) => one.textContent.trim(), found = {};"
        "for (const one of document.querySelectorAll('.figure'))"
        " found[text(one.querySelector('span'))] = text(one.querySelector('b'));"
        "for (const one of document.querySelectorAll('.facts dt, .share-row > span'))"
        " found[text(one)] = text(one.parentElement.matches('.share-row')"
        " ? one.parentElement.querySelector('b') : one.nextElementSibling);"
        "return found"
    )
    rows = browser.run(
        "return [...document.querySelectorAll('tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    return figures, rows


def as_words(text: str) -> list[str]:
    return re.sub(r"\s+", " ", text).split(" ")


def seconds_in(text: str) -> float:
    number, unit = as_words(text)[:2]
    return float(number) * {"s": 1, "ms": 1e-3, "min": 60}[unit]


def test_run(browser: Any, directory: Path, tmp_path: Path):
    figures, rows = look(browser, tmp_path, "report", directory)
    shown = run("top", directory, "--once").output
    (document,) = as_json("report", directory)["documents"]
    listed = as_json("ls", directory)["steps"]
    assert f"{figures['steps']} steps, {figures['in all']} " in shown
    assert f"goes next  {figures['deleted after the next save']}" in shown
    assert f"blocked    {figures['blocked for a save (median)']} for a save" in shown
    lines = {words[0]: words for words in map(as_words, map(str.strip, shown.splitlines()))}
    assert [row[0] for row in rows] == [str(one["step"]) for one in reversed(listed)]
    for cells, step in zip(rows, reversed(document["steps"]), strict=True):
        number, state, _, size, loss, gain, blocked, _ = cells
        terminal = lines[number]
        assert state.startswith(step["state"])
        assert terminal[1].startswith(step["state"])
        assert size == " ".join(terminal[terminal.index("KiB") - 1 : terminal.index("KiB") + 1])
        numbers = [float(word) for word in terminal[-4:-2]]
        assert [float(loss), float(gain)] == pytest.approx(numbers, nan_ok=True)
        assert numbers == pytest.approx(
            [float(step["metrics"][name]) for name in ("loss", "gain")], rel=1e-5, nan_ok=True
        )
        assert blocked == " ".join(terminal[-2:])


def test_checkpoint(browser: Any, directory: Path, tmp_path: Path):
    figures, _ = look(browser, tmp_path, "report", directory / "6")
    shown = run("show", directory / "6").output
    totals = as_json("show", directory / "6")["totals"]
    (document,) = as_json("report", directory / "6")["documents"]
    assert document["totals"]["bytes"] == totals["bytes"]
    parameters = f"{document['totals']['parameters']:,}"
    assert f"{parameters} parameters of float32, {figures['of arrays']}" in shown
    assert parameters == as_words(figures["parameters"])[0] == "9,000"
    assert (figures["arrays"], figures["in files"]) == (
        str(totals["arrays"]),
        f"{totals['file_bytes'] / 1024:.1f} KiB",
    )
    assert figures["least"] == figures["most"] == "6"  # params/layers/0, the first of the largest
    assert figures["norm"] == f"{np.linalg.norm(np.full(3000, 6.0)):.6g}"


def test_comparison(browser: Any, directory: Path, tmp_path: Path):
    pair = (directory / "3", directory / "6")
    figures, rows = look(browser, tmp_path, "report", "--compare", *pair)
    shown = run("diff", *pair).output
    counts = re.search(r"(\d+) leaves: (\d+) the same, (\d+) different", shown)
    assert counts is not None
    assert (figures["leaves are equal"], figures["leaves differ"]) == counts.groups()[1:]
    leaves = {
        one["path"]: one["elements"] for one in as_json("diff", *pair)["leaves"] if one["elements"]
    }
    in_table = [row for row in rows if row[0].endswith("/kernel")]
    assert len(in_table) == 3
    for path, relative, delta, norm, _, changed, *_ in in_table:
        elements = leaves[path]
        assert changed == ("all " if elements["changed"] else "") + f"{elements['changed']:,}"
        said = f"{elements['changed']:,} (100 %)" if elements["changed"] else "no difference in 1"
        assert said in run("diff", *pair, path).output
        # All elements changed by the same: the norm is the largest times the root of the count.
        assert float(delta) == pytest.approx(elements["largest"] * 3000**0.5, rel=1e-3)
        assert float(relative) == pytest.approx(float(delta) / float(norm), rel=1e-2)


def test_plan(browser: Any, tmp_path: Path):
    figures, _ = look(browser, tmp_path, *PLAN)
    shown = run(*PLAN).output
    (document,) = as_json(*PLAN)["variants"]
    lines = {re.split(r"  +", line.strip())[0]: line for line in shown.splitlines()}
    assert f"{figures['parameters']}" in lines["parameters"]
    assert f"{document['parameters']:,}" == figures["parameters"]
    assert figures["in all"] in lines["in all"]
    assert f"{document['total_bytes']:,}" in lines["in all"]
    assert figures["files, with metadata"] == f"{document['files']['in_all']}"
    assert f" {figures['files, with metadata']} " in f"{lines['files']} "
    assert figures["on the busiest host"] in lines["a host, most"]
    assert figures["largest file"] in lines["largest file"]
    for name, group in document["groups"].items():
        size = " ".join(as_words(figures[name])[:2])
        assert size in lines[name], name
        assert float(size.split()[0]) == pytest.approx(group["bytes"] / 2**20, abs=0.06) or (
            size == f"{group['bytes']} B"
        )
    times = {
        "to save": document["save"]["duration_s"],
        "save_async blocks": document["save"]["save_async_blocked_s"],
        "to restore": document["restore"]["duration_s"],
    }
    for name, seconds in times.items():
        assert seconds_in(figures[name]) == pytest.approx(seconds, abs=6e-4)
        assert f"{seconds:.3g} s" in shown


# The documented schema


def complaints_about(value: Any, kind: Any, where: str) -> list[str]:
    """Where a value is not of a type that the schema gives it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return []
    if origin in (Union, UnionType):
        tried = [complaints_about(value, one, where) for one in arguments]
        return [] if [] in tried else [f"{where}: {value!r:.60} is none of {kind}"]
    if origin is Literal:
        return [] if value in arguments else [f"{where}: {value!r:.60} is not in {arguments}"]
    if origin is list and isinstance(value, list):
        parts = enumerate(value)
        return [c for n, one in parts for c in complaints_about(one, arguments[0], f"{where}[{n}]")]
    if origin is dict and isinstance(value, dict):
        parts = value.items()
        return [c for n, one in parts for c in complaints_about(one, arguments[1], f"{where}.{n}")]
    if is_typeddict(kind):
        if not isinstance(value, dict):
            return [f"{where}: {value!r:.60} is no {kind.__name__}"]
        hints: Mapping[str, Any] = get_type_hints(kind)
        odd = [f"{where}: {name} is on one side only" for name in hints.keys() ^ value.keys()]
        both = hints.keys() & value.keys()
        return odd + [c for n in both for c in complaints_about(value[n], hints[n], f"{where}.{n}")]
    fits = isinstance(value, NoneType if kind is None else origin or kind)
    is_number = kind is float and isinstance(value, int)
    return [] if fits or is_number else [f"{where}: {value!r:.60} is no {kind}"]


@pytest.mark.parametrize("kind", ["run", "checkpoint", "comparison", "along", "plan"])
def test_documents_have_the_fields_of_the_schema(directory: Path, tmp_path: Path, kind: str):
    commands: dict[str, tuple[Any, ...]] = {
        "run": ("report", directory),
        "checkpoint": ("report", directory / "6", "--verify"),
        "comparison": ("report", "--compare", directory / "3", directory / "6"),
        "along": ("report", "--compare", directory),
        "plan": PLAN,
    }
    if kind == "plan":
        assert run(*PLAN, "--report", tmp_path / "p.html").exit_code == 0
        data = re.search(r'id="data">(.*?)</script>', (tmp_path / "p.html").read_text(), re.DOTALL)
        assert data is not None
        (document,) = json.loads(data[1])["documents"]
    else:
        (document,) = as_json(*commands[kind])["documents"]
    name = "Comparison" if kind == "along" else kind.capitalize()
    assert complaints_about(document, getattr(schema, f"{name}Document"), kind) == []
