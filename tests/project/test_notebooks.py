"""The notebooks of examples/ run, and show checkpoints and plans as HTML."""

import json
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from html_pages import texts_in

EXAMPLES = Path(__file__).parents[2] / "examples"
# One kernel runs all of them, one after the other. The plan comes first: it needs no JAX.
NAMES = ("plan_70b", "first_steps", "from_orbax")
PAGES = {
    "plan_70b": {"first": "Plan", "restore": "RestorePlan", "parity": "Plan"},
    "first_steps": {"show": "Checkpoint", "leaf": "LazyArray", "newest": "Checkpoint"},
    "from_orbax": {"open": "Checkpoint", "convert": "ConvertReport", "newest": "Checkpoint"},
}
"""Cells whose last expression is shown as HTML, with its class."""
AFTERWARDS = {"plan_70b": "import sys\nassert 'jax' not in sys.modules"}


def read_notebook(name: str) -> dict[str, Any]:
    return json.loads((EXAMPLES / f"{name}.ipynb").read_text())


def test_the_notebooks_are_all_known():
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_valid_and_stored_without_outputs(name: str):
    nbformat = pytest.importorskip("nbformat", reason="nbformat checks notebooks: make venv")
    notebook = read_notebook(name)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) <= 12
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert PAGES[name].keys() <= {cell["id"] for cell in cells}


def test_the_notebooks_run_and_show_html(tmp_path: Path):
    pytest.importorskip("ipykernel", reason="ipykernel runs notebooks: make venv")
    nbclient = pytest.importorskip("nbclient", reason="nbclient runs notebooks: make venv")
    nbformat = pytest.importorskip("nbformat", reason="nbformat reads notebooks: make venv")
    cells: list[Any] = []
    for name in NAMES:
        for cell in read_notebook(name)["cells"]:
            if cell["cell_type"] == "code":
                source = "".join(cell["source"])
                cells.append(nbformat.v4.new_code_cell(source, id=f"{name}-{cell['id']}"))
        cells.append(nbformat.v4.new_code_cell(AFTERWARDS.get(name, "")))
        cells.append(nbformat.v4.new_code_cell("%reset -f"))
    together = nbformat.v4.new_notebook(cells=cells)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # those of Jupyter's own packages
        resources = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(together, timeout=600, resources=resources).execute()
    outputs = {cell["id"]: cell["outputs"] for cell in cells}
    for name, shown in PAGES.items():
        for cell, kind in shown.items():
            (page,) = (
                output["data"]["text/html"]
                for output in outputs[f"{name}-{cell}"]
                if output["output_type"] == "execute_result"
            )
            assert texts_in(page)[0] == kind
    assert not any(tmp_path.iterdir())
    assert "resumes after step 10" in outputs["first_steps-resume"][0]["text"]
    assert "[1, 2, 3]" in outputs["from_orbax-drop-in"][0]["text"]


# In a browser

CHROMIUM = Path("/usr/bin/chromium")
HOSTILE = (
    "<script>window.hit = 1</script>",
    '"><img src=x onerror="window.hit = 1">',
    "</div></details><style>* { color: red !important }</style>",
    "' onmouseover='window.hit = 1",
)
PROBE = """
const frames = [...document.querySelectorAll(".cell > div")];
const look = frame => {
  const closed = frame.getBoundingClientRect();
  const folds = [...frame.querySelectorAll("details")];
  const wereOpen = folds.filter(fold => fold.open).length;
  folds.forEach(fold => { fold.open = true; });
  const opened = frame.getBoundingClientRect();
  const rows = [...frame.querySelectorAll("details span")].map(e => e.getBoundingClientRect());
  const title = frame.querySelector("b");
  return {
    kind: title.textContent, folds: folds.length, wereOpen, closed: closed.height,
    opened: opened.height, isVisible: rows.every(box => box.height > 0 && box.width > 0),
    color: getComputedStyle(title).color, around: getComputedStyle(frame.parentNode).color,
    border: getComputedStyle(frame).borderTopColor, isInside: closed.right <= innerWidth,
  };
};
const found = frames.map(look);
document.getElementById("found").textContent = JSON.stringify({
  frames: found, hit: window.hit || 0, scripts: document.scripts.length,
  images: document.images.length, requests: performance.getEntriesByType("resource").length,
  outside: getComputedStyle(document.getElementById("outside")).color,
});
"""


def pages_of(directory: Path) -> list[str]:
    """The HTML of an object of each class, with hostile names."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    kernel = jax.device_put(np.ones((8, 6), np.float32), NamedSharding(mesh, P("data")))
    layers = {n: {"kernel": np.zeros(4, np.float32)} for n in range(12)}
    tree: dict[str, Any] = {
        name: {"kernel": kernel + n, "text": name} for n, name in enumerate(HOSTILE)
    }
    tree["layers"] = layers
    with ostraka.Manager(directory / "runs") as manager:
        manager.save(1, tree, metrics={HOSTILE[0]: 0.5}, metadata={HOSTILE[1]: HOSTILE[2]})
    checkpoint = ostraka.open(directory / "runs")
    planned = ostraka.plan(checkpoint.path)
    copied = ostraka.copy(checkpoint.path, directory / "copy")
    merged = ostraka.merge([checkpoint.path, directory / "copy"], directory / "merged")
    damaged = next((directory / "copy").glob("*/shard_*"))
    damaged.unlink()
    path = next(path for path in checkpoint if path.endswith("kernel"))
    objects: list[Any] = [
        checkpoint,
        checkpoint[path],
        planned,
        planned.restore(mesh={"data": 2}),
        ostraka.verify(directory / "copy", raises=False),
        ostraka.repair(directory / "copy", sources=[checkpoint.path]),
        copied,
        ostraka.convert(checkpoint.path, directory / "orbax", to="orbax"),
        merged,
    ]
    return [thing._repr_html_() for thing in objects]


@pytest.mark.skipif(not CHROMIUM.exists(), reason="/usr/bin/chromium is not installed")
def test_a_browser_shows_each_page_in_light_and_dark(tmp_path: Path):
    themes = {"light": "background: #fff; color: #101010", "dark": "background: #111; color: #eee"}
    pages = pages_of(tmp_path)
    body = "".join(
        f'<div class="cell" style="{style}">{page}</div>'
        for style in themes.values()
        for page in pages
    )
    (tmp_path / "page.html").write_text(
        f'<!doctype html><meta charset="utf-8"><body><p id="outside">outside</p>{body}'
        f'<pre id="found"></pre><script>{PROBE}</script></body>'
    )
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", "--window-size=1000,800", f"--user-data-dir={tmp_path / 'profile'}"),
        *("--dump-dom", (tmp_path / "page.html").as_uri()),
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    shutil.rmtree(tmp_path / "profile", ignore_errors=True)
    inside = done.stdout.split('<pre id="found">')[1].split("</pre>")[0]
    found = json.loads(inside.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert found["hit"] == 0
    assert (found["scripts"], found["images"], found["requests"]) == (1, 0, 0)
    assert found["outside"] == "rgb(0, 0, 0)"
    kinds = ["Checkpoint", "LazyArray", "Plan", "RestorePlan"]
    kinds += [f"{name}Report" for name in ("Verify", "Repair", "Copy", "Convert", "Merge")]
    assert [frame["kind"] for frame in found["frames"]] == kinds * 2
    for frame in found["frames"]:
        assert frame["color"] == frame["around"]  # the theme's own
        assert frame["isInside"]
        assert frame["isVisible"]
        assert frame["closed"] < 400
        assert frame["wereOpen"] == (frame["kind"] == "VerifyReport")
        assert (frame["opened"] > frame["closed"]) == (frame["folds"] > frame["wereOpen"])
    light, dark = found["frames"][0], found["frames"][len(kinds)]
    assert light["color"] == "rgb(16, 16, 16)"
    assert dark["color"] == "rgb(238, 238, 238)"
    assert light["border"] != dark["border"]
    assert len(body) < 200_000
