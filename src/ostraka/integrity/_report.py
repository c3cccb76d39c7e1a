"""The reports of `verify` and `repair`, as data and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from ostraka.common import html
from ostraka.common.units import human_bytes
from ostraka.errors import Problem, count_of, name_few
from ostraka.layout.file_names import ADDED_NAME, PIN_NAME
from ostraka.layout.shard_file import is_shards_directory, shards_directory
from ostraka.saving.place import is_of_a_save
from ostraka.storage import Store, is_claim


@dataclass(frozen=True, slots=True)
class Note:
    """A remark about a file that is not damaged.

    Attributes:
        file: The name of the file.
        found: The remark, which completes "FILE: …".
    """

    file: str
    found: str

    def __str__(self) -> str:
        return f"{self.file}: {self.found}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`.

    Attributes:
        path: The location of the checkpoint.
        leaves: Number of arrays.
        files: Number of shard files.
        bytes_read: Bytes that were read.
        duration_s: Duration in seconds.
        problems: All damage that was found.
        notes: Files that are not part of the checkpoint. With `read=False` also the files that only
            reading can prove.
        unchecked: Files that could not be compared, because their index is damaged.
        proven: With `read=False`, the number of files that the store proves to be unchanged.
        steps: With `all_steps=True`, the report of each step.
        has_digests: False for safetensors files, whose bytes can't be compared.
        is_empty: True if the checkpoint has no array, number or string.
    """

    path: str
    leaves: int
    files: int
    bytes_read: int
    duration_s: float
    problems: tuple[Problem, ...]
    notes: tuple[Note, ...] = ()
    unchecked: tuple[str, ...] = ()
    proven: int = 0
    steps: tuple[VerifyReport, ...] = ()
    has_digests: bool = True
    is_empty: bool = False

    @property
    def ok(self) -> bool:
        """True if no problem was found."""
        return not self.problems

    @property
    def damaged_files(self) -> tuple[str, ...]:
        """The names of damaged files, each once."""
        return tuple(dict.fromkeys(problem.file for problem in self.problems))

    @property
    def damaged_processes(self) -> tuple[int, ...]:
        """The processes that wrote damaged files."""
        return tuple(sorted({p.process for p in self.problems if p.process is not None}))

    @property
    def damaged_leaves(self) -> dict[str, float]:
        """The lost fraction of each affected leaf, above 0 and at most 1."""
        lost: Counter[str] = Counter()
        boxes = dict.fromkeys(box for problem in self.problems for box in problem.boxes)
        for box in boxes:
            lost[box.leaf] += box.elements
        return {box.leaf: min(lost[box.leaf] / prod(box.shape), 1.0) for box in boxes}

    def __str__(self) -> str:
        if self.steps:
            lines = [str(step) for step in self.steps]
            damaged = sum(not step.ok for step in self.steps) or "none"
            return "\n".join([*lines, f"{count_of(len(lines), 'step')}, {damaged} of them damaged"])
        if self.problems and not self.files:
            return f"{self.path}: {self._in_brief()}"
        arrays, files = count_of(self.leaves, "array"), count_of(self.files, "file")
        size = f"{arrays} in {files}, {self.bytes_read:,} bytes"
        state = self._in_brief() if self.problems else self._intact()
        return f"{self.path}: {state} ({size}, {self.duration_s:.2f} s)"

    def _repr_html_(self) -> str:
        if self.steps:
            damaged = sum(not step.ok for step in self.steps)
            rows = [
                (step.path, step._in_brief() if step.problems else step._intact())
                for step in self.steps
            ]
            return html.frame(
                "VerifyReport",
                self.path,
                html.facts({"steps": f"{len(rows):,}", "damaged": f"{damaged:,}"}),
                html.table(count_of(len(rows), "step"), ("step", "result"), rows),
                html.sentences("problem", [p.explain() for p in self.problems], is_open=True),
            )
        entries = {
            "result": self._in_brief() if self.problems else self._intact(),
            "arrays": f"{self.leaves:,}",
            "shard files": f"{self.files:,}",
            "read": html.size(self.bytes_read),
            "duration": f"{self.duration_s:.2f} s",
        }
        lost = [(leaf, f"{share:.1%}") for leaf, share in self.damaged_leaves.items()]
        return html.frame(
            "VerifyReport",
            self.path,
            html.facts(entries),
            html.sentences("problem", [p.explain() for p in self.problems], is_open=True),
            html.table(f"damaged: {count_of(len(lost), 'leaf')}", ("leaf", "lost"), lost),
            html.sentences("note", [str(note) for note in self.notes]),
            html.sentences("unchecked file", self.unchecked),
        )

    def _intact(self) -> str:
        if not self.has_digests:
            return "complete and well-formed; it has no digests, so values can't be checked"
        if self.is_empty:
            return "intact, but there is nothing in it"
        if not self.proven and not any(note.found.startswith(UNPROVEN) for note in self.notes):
            return "intact"
        return f"all files are there, {self.proven} proven to be as they were saved"

    def _in_brief(self) -> str:
        """`1 problem: 1 of 8 shard files, written by process 2 on n7, 2 of 40 leaves affected`."""
        names = [file.rpartition("/")[2] for file in self.damaged_files]
        others = [name for name in names if not name.startswith("shard_")]
        said = others[:2] + ([f"{len(others) - 2} more"] if len(others) > 2 else [])
        if shard_files := len(names) - len(others):
            said.insert(0, f"{shard_files} of {count_of(self.files, 'shard file')}")
        if writers := list(dict.fromkeys(p.writer for p in self.problems if p.writer)):
            more = f" and {len(writers) - 3} more" if len(writers) > 3 else ""
            said.append(f"written by {', '.join(writers[:3])}{more}")
        if affected := self.damaged_leaves:
            said.append(f"{len(affected)} of {count_of(self.leaves, 'leaf')} affected")
        if self.unchecked:
            said.append(f"{count_of(len(self.unchecked), 'file')} can't be checked")
        return f"{count_of(len(self.problems), 'problem')}: {', '.join(said)}"


UNPROVEN = "only reading tells if it is intact"


# Other files in the directory of a checkpoint: of interrupted saves, and of other programs.


def find_foreign(store: Store, save_id: str, own: Collection[str]) -> list[Note]:
    """Notes on the files at a checkpoint that are not in `own`, the names of its files.

    They are no damage, since readers never open them. A directory gets one note.
    """
    mine = shards_directory(save_id)
    found: dict[str, int] = {}
    for file in store.files(""):
        if file.name in own or file.name in (PIN_NAME, ADDED_NAME):
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


# Repairs

ANOTHER_COPY = "pass another copy of this save as sources="
"""Advice for a program. The command has an option of another name."""


@dataclass(frozen=True, slots=True)
class RepairedFile:
    """A file that was lost or damaged, and is complete again.

    Attributes:
        file: The name of the file.
        found: The damage.
        leaves: The leaves that had lost bytes.
        origins: The origins of the bytes that replaced them.
        nbytes: The size of the file, which is written as a whole.
        process: The process that wrote it.
    """

    file: str
    found: str
    leaves: tuple[str, ...]
    origins: tuple[str, ...]
    nbytes: int
    process: int

    def __str__(self) -> str:
        leaves = f" (leaf {name_few(self.leaves)})" if self.leaves else ""
        return f"{self.file}{leaves}: {self.found}; from {', '.join(self.origins)}"


RepairResult = RepairedFile | Problem
"""A lost file that was repaired, or the reason why it could not be."""


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The result of `repair`. With `dry_run`, it has what `repair` would do.

    Attributes:
        path: The location of the checkpoint.
        dry_run: True if nothing was written.
        repaired: Files that were repaired.
        problems: Damage that could not be repaired, and the reasons.
        notes: Other remarks.
        bytes_read: Bytes that all processes read.
        bytes_written: Bytes that all processes wrote.
        duration_s: Duration in seconds.
    """

    path: str
    dry_run: bool
    repaired: tuple[RepairedFile, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    duration_s: float

    @property
    def ok(self) -> bool:
        """True if no damage is left, or with `dry_run` would be left."""
        return not self.problems

    def __str__(self) -> str:
        read, written = human_bytes(self.bytes_read), human_bytes(self.bytes_written)
        sizes = f"({read} read, {written} written, {self.duration_s:.2f} s)"
        head = f"{self.path}: {self._in_brief()} {sizes}"
        return "\n".join([head, *(f"  {line}" for line in self.lines())])

    def _in_brief(self) -> str:
        if not self.repaired and self.ok:
            done = "nothing to repair"
        else:
            verb = "would be repaired" if self.dry_run else "repaired"
            done = f"{count_of(len(self.repaired), 'file')} {verb}"
        if self.problems:
            done += f", {count_of(len(self.problems), 'problem')} left"
        return done

    def _repr_html_(self) -> str:
        entries = {
            "result": self._in_brief(),
            "read": html.size(self.bytes_read),
            "written": html.size(self.bytes_written),
            "duration": f"{self.duration_s:.2f} s",
        }
        return html.frame(
            "RepairReport",
            self.path,
            html.facts(entries),
            html.sentences("problem", [p.explain() for p in self.problems], is_open=True),
            html.sentences("repaired file", [str(file) for file in self.repaired]),
            html.sentences("note", self.notes),
        )

    def lines(self) -> list[str]:
        """One line for each file, problem and note."""
        return [*map(str, self.repaired), *(f"left: {p}" for p in self.problems), *self.notes]

    def describe(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {**asdict(self), "ok": self.ok}


def decode_repaired(encoded: Sequence[Any]) -> list[RepairedFile]:
    """Return the files that other processes sent as JSON."""
    return [
        RepairedFile(file, found, tuple(leaves), tuple(origins), nbytes, process)
        for file, found, leaves, origins, nbytes, process in encoded
    ]
