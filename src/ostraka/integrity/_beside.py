"""Files in the directory of a checkpoint that are not its own: leftovers, and what is not ours."""

from __future__ import annotations

from collections.abc import Collection

from ostraka._format import is_shards_directory, shards_directory
from ostraka._leftovers import is_of_a_save
from ostraka.errors import count_of
from ostraka.integrity._report import Note
from ostraka.storage import Store, is_claim


def find_foreign(store: Store, save_id: str, own: Collection[str]) -> list[Note]:
    """What lies at a checkpoint and is not in `own`, the names of its files.

    Nothing of that is damage: readers never look at it. A directory is one note, with its files.
    """
    mine = shards_directory(save_id)
    found: dict[str, int] = {}
    for file in store.files(""):
        if file.name in own:
            continue
        top = file.name.partition("/")[0]
        name = file.name if top in (mine, file.name) else f"{top}/"
        found[name] = found.get(name, 0) + 1
    is_claimed = any(map(is_claim, found))
    return [Note(name, _describe(name, count, is_claimed)) for name, count in found.items()]


def _describe(name: str, count: int, is_claimed: bool) -> str:
    top = name.rstrip("/")
    if is_claim(name):
        return "a save is under way here, or died here"
    if is_of_a_save(top):
        what = f"{count_of(count, 'file')} of a save" if is_shards_directory(top) else "of a save"
        if is_claimed:
            return f"{what} that is under way, or died"
        return f"{what} that died; the next save to this path, or ostraka gc, removes it"
    files = f"{count_of(count, 'file')} that" if name.endswith("/") else "a file that"
    return f"{files} the checkpoint does not know"
