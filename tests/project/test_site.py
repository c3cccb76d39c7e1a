"""The menu of the manual has every page, its reference every public name, its diagrams are drawn.

`make docs` checks the site itself.
"""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import ostraka
from ostraka import data, errors, exercises, manager, metrics, sharding, storage, testing

ROOT = Path(__file__).parents[2]
START = "index.md"
"""Made from README.md."""


def listed_pages() -> list[str]:
    menu = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    return re.findall(r": (\S+\.md)$", menu, re.MULTILINE)


def test_the_menu_has_every_page_once_and_no_other():
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    listed = listed_pages()
    assert len(listed) == len(set(listed))
    assert set(listed) == {START, *pages}


FOR_STORES = ("FileInfo", "FileReader", "FileWriter", "MemoryStore", "PlaceLock", "Store", "Traits")
"""The names that a store of a user's own needs."""


def public_names() -> Iterator[str]:
    yield from (f"ostraka.{name}" for name in ostraka.__all__)
    for module in (data, errors, exercises, metrics, sharding, testing):
        yield from (f"{module.__name__}.{name}" for name in module.__all__)
    yield from (f"ostraka.storage.{name}" for name in FOR_STORES if hasattr(storage, name))
    yield from (f"ostraka.manager.{name}" for name in {*manager.__all__} - {*ostraka.__all__})


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs/reference/api.md").read_text("utf-8")
    shown = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    wanted = {
        name
        for name in public_names()
        if not isinstance(getattr(ostraka, name.partition(".")[2], None), ModuleType)
    }
    assert sorted(shown) == sorted(wanted - {"ostraka.__version__"})


def test_the_diagrams_are_those_of_the_script():
    folder = ROOT / "docs/images"
    for name, draw in runpy.run_path(str(folder / "diagrams.py"))["PICTURES"].items():
        assert (folder / f"{name}.svg").read_text("utf-8") == draw(), f"run {folder}/diagrams.py"
