"""What `verify` found, as data and in words."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ostraka.errors import Problem, count_of


@dataclass(frozen=True, slots=True)
class Note:
    """Something at a checkpoint that is not damage, and good to know."""

    file: str
    found: str

    def __str__(self) -> str:
        return f"{self.file}: {self.found}"


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found."""

    path: str
    leaves: int
    files: int
    bytes_read: int
    time_s: float
    problems: tuple[Problem, ...]
    notes: tuple[Note, ...] = ()
    """Files beside the checkpoint that are not its own, and with `read=False` what only reading
    could tell."""
    unchecked: tuple[str, ...] = ()
    """Files that could not be compared, because the index that has their digests is damaged."""
    proven: int = 0
    """With `read=False`: files of which the store says that nobody has written them since."""
    steps: tuple[Report, ...] = ()
    """With `all_steps=True`: the report of each step."""
    has_digests: bool = True
    """Whether bytes could be compared with what was written; safetensors files have no digests."""

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def damaged_files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(problem.file for problem in self.problems))

    @property
    def damaged_processes(self) -> tuple[int, ...]:
        """The processes that wrote what is damaged."""
        return tuple(sorted({p.process for p in self.problems if p.process is not None}))

    @property
    def damaged_leaves(self) -> dict[str, float]:
        """How much of each leaf that is hurt is lost, from above 0 to 1."""
        lost: dict[str, set[tuple[tuple[int, int], ...]]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for box in (box for problem in self.problems for box in problem.boxes):
            lost.setdefault(box.leaf, set()).add(box.box)
            shapes[box.leaf] = box.shape
        return {
            leaf: min(sum(prod(b - a for a, b in box) for box in boxes) / prod(shapes[leaf]), 1.0)
            for leaf, boxes in lost.items()
        }

    def __str__(self) -> str:
        if self.steps:
            lines = [str(step) for step in self.steps]
            damaged = sum(not step.ok for step in self.steps) or "none"
            return "\n".join([*lines, f"{count_of(len(lines), 'step')}, {damaged} of them damaged"])
        arrays, files = count_of(self.leaves, "array"), count_of(self.files, "file")
        size = f"{arrays} in {files}, {self.bytes_read:,} bytes"
        state = self._in_brief() if self.problems else self._intact()
        return f"{self.path}: {state} ({size}, {self.time_s:.2f} s)"

    def _intact(self) -> str:
        if not self.has_digests:
            return "complete and well-formed; it has no digests, so values can't be checked"
        if not self.proven and not any(note.found.startswith(UNPROVEN) for note in self.notes):
            return "intact"
        return f"all files are there, {self.proven} proven to be as they were saved"

    def _in_brief(self) -> str:
        """`3 problems: 2 of 8 shard files, written by process 2 on node7, 12 of 40 leaves hurt`."""
        names = [file.rpartition("/")[2] for file in self.damaged_files]
        others = [name for name in names if not name.startswith("shard_")]
        said = others[:2] + ([f"{len(others) - 2} more"] if len(others) > 2 else [])
        if hurt_files := len(names) - len(others):
            said.insert(0, f"{hurt_files} of {count_of(self.files, 'shard file')}")
        if writers := list(dict.fromkeys(p.writer for p in self.problems if p.writer)):
            more = f" and {len(writers) - 3} more" if len(writers) > 3 else ""
            said.append(f"written by {', '.join(writers[:3])}{more}")
        if hurt := self.damaged_leaves:
            said.append(f"{len(hurt)} of {count_of(self.leaves, 'leaf')} hurt")
        if self.unchecked:
            said.append(f"{count_of(len(self.unchecked), 'file')} can't be checked")
        return f"{count_of(len(self.problems), 'problem')}: {', '.join(said)}"


UNPROVEN = "only reading tells if it is intact"
