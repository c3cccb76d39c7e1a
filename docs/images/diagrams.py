"""Draw the diagrams of the manual in this folder: `python docs/images/diagrams.py`.

Each is plain SVG on a ground of its own, light or dark as the reader's system. They are as narrow
as a phone, so that their text stays legible there. The groups of parity are those that Ostraka
plans.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from ostraka.layout.plan_parity import plan_parity
from ostraka.layout.shard_file import FileEntry

FOLDER = Path(__file__).parent
WIDTH = 440
LINE = 17
"""From one line of text to the next."""

STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif }
.small { font-size: 12px }
.code { font: 11px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }
.bold { font-weight: 600 } .middle { text-anchor: middle } .end { text-anchor: end }
.ground { fill: #fbfaf7; stroke: #dcd8cf } .ink { fill: #22302f } .dim { fill: #5d6b6a }
.line { stroke: #5d6b6a; fill: none; stroke-width: 1.4 } .head { fill: #5d6b6a }
.dashed { stroke-dasharray: 4 3 }
.box { fill: #ffffff; stroke: #8b9896 } .faint { fill: none; stroke: #c3c9c6 }
.a { fill: #cfe3f5; stroke: #3f78a8 } .b { fill: #fbdcc4; stroke: #b4622a }
.c { fill: #d3ebd0; stroke: #4a8a45 } .d { fill: #e4d8f3; stroke: #7a57ab }
.bad { fill: #f7d0d0; stroke: #b23b3b }
@media (prefers-color-scheme: dark) {
.ground { fill: #20262b; stroke: #3a434a } .ink { fill: #e6ebe9 } .dim { fill: #a3b0ae }
.line { stroke: #a3b0ae } .head { fill: #a3b0ae }
.box { fill: #2b333a; stroke: #7d8a88 } .faint { stroke: #4a545b }
.a { fill: #24486a; stroke: #7fb4e0 } .b { fill: #6b3d1d; stroke: #e8a06c }
.c { fill: #2b5429; stroke: #86c580 } .d { fill: #49336b; stroke: #b99be4 }
.bad { fill: #6b2626; stroke: #e58585 }
}
"""
GROUPS = ("a", "b", "c", "d")


class Drawing:
    """Shapes and text, top left first. Positions are the user units of the SVG."""

    def __init__(self, title: str, height: float):
        self._height = height
        self._title = title
        self._parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, style: str = "box", r: float = 4) -> None:
        """Draw a rectangle."""
        self._add(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r:g}"', style)

    def text(self, x: float, y: float, text: str, style: str = "ink") -> None:
        """Write a line of text on the base line `y`."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(text)}</text>')

    def lines(self, x: float, y: float, lines: Sequence[str], style: str = "ink") -> None:
        """Write several lines of text."""
        for number, line in enumerate(lines):
            self.text(x, y + number * LINE, line, style)

    def line(self, *points: tuple[float, float], style: str = "line") -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._add(f'<polyline points="{path}"', style)

    def arrow(self, *points: tuple[float, float], style: str = "line") -> None:
        """Draw a line through points with a head at its end."""
        self.line(*points, style=style)
        (x0, y0), (x, y) = points[-2:]
        length = max(abs(x - x0), abs(y - y0))
        dx, dy = (x - x0) / length, (y - y0) / length
        corners = ((x, y), (x - 8 * dx - 4 * dy, y - 8 * dy + 4 * dx))
        corners += ((x - 8 * dx + 4 * dy, y - 8 * dy - 4 * dx),)
        path = " ".join(f"{cx:g},{cy:g}" for cx, cy in corners)
        self._add(f'<polygon points="{path}"', "head")

    def dot(self, x: float, y: float, r: float, style: str) -> None:
        """Draw a filled circle."""
        self._add(f'<circle cx="{x:g}" cy="{y:g}" r="{r:g}"', style)

    def file(self, x: float, y: float, w: float, name: str, style: str = "box") -> None:
        """Draw a file with its name in it, 22 high."""
        self.box(x, y, w, 22, style, 3)
        self.text(x + w / 2, y + 15, name, "ink code middle")

    def svg(self) -> str:
        """Return the picture."""
        size = f'width="{WIDTH}" height="{self._height:g}" viewBox="0 0 {WIDTH} {self._height:g}"'
        ground = f'width="{WIDTH - 1}" height="{self._height - 1:g}"'
        lines = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(self._title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect x="0.5" y="0.5" {ground} rx="8" class="ground"/>',
            *self._parts,
            "</svg>",
        )
        return "\n".join(lines) + "\n"

    def _add(self, tag: str, style: str) -> None:
        self._parts.append(f'{tag} class="{style}"/>')


def draw_layout() -> str:
    """A mesh, its shard files, and `_METADATA`."""
    it = Drawing("From a mesh to shard files, process indexes and _METADATA", 500)
    it.text(20, 28, "A run: 2 processes, 8 devices, mesh x=4, y=2", "ink bold")
    for process in range(2):
        left = 20 + process * 205
        it.box(left, 40, 195, 96, "faint", 6)
        it.text(left + 10, 58, f"process {process}", "dim")
        for number in range(4):
            x, y = left + 10 + (number % 2) * 90, 66 + (number // 2) * 34
            it.box(x, y, 85, 28, GROUPS[process])
            it.text(x + 42, y + 18, f"device {process * 4 + number}", "ink middle")
        it.arrow((left + 97, 136), (left + 97, 168))
    it.text(220, 157, "each writes its shards", "dim middle")
    it.box(20, 172, 400, 176, "faint", 6)
    it.text(30, 191, "shards-5960338a688b8461/", "ink code")
    for process in range(2):
        left = 30 + process * 195
        for number in range(4):
            name = f"shard_{process * 4 + number:05}.safetensors"
            it.file(left, 200 + number * 26, 185, name, GROUPS[process])
        it.file(left, 312, 185, f"process_{process:05}.json")
    it.text(220, 371, "files, sizes and the checksum of every block", "dim middle")
    it.arrow((220, 379), (220, 398))
    it.box(20, 402, 400, 82, "c", 6)
    it.text(32, 422, "_METADATA", "ink code bold")
    it.lines(
        32,
        441,
        (
            "the tree, shapes, dtypes, meshes and specs,",
            "which slice is in which file, checksums of the indexes.",
            "Written last: with it, the checkpoint is committed.",
        ),
    )
    return it.svg()


def draw_commit() -> str:
    """The moments of a save, and the outcome of a kill at each."""
    moments = (
        ("save() is called", "Every process checks its tree."),
        ("the lock is taken", "_CLAIM-… in the directory"),
        ("shards are written", "into shards-<id>/, each file synced"),
        ("indexes are written", "with the checksums, and synced"),
        ("a temporary _METADATA is written", "and synced, and all files are checked"),
        ("rename to _METADATA", "the commit"),
        ("the directory is synced", "Old shards and the lock are removed."),
        ("save() returns", "on every process"),
    )
    commit = 5
    top, step = 64, 50
    it = Drawing("The moments of a save, and what a kill leaves at each", top + step * 8 + 6)
    it.text(20, 28, "Saving over an older checkpoint", "ink bold")
    it.text(420, 28, "killed here, you have", "dim end")
    middle = top + step * commit - step / 2 + 2
    it.box(318, top - 20, 102, middle - top + 14, "a", 6)
    it.lines(369, top + 92, ("the old", "checkpoint,", "unchanged"), "ink middle")
    it.box(318, middle + 4, 102, top + step * 7 - middle + 22, "c", 6)
    it.lines(369, top + step * 6 - 12, ("the new", "checkpoint,", "complete"), "ink middle")
    it.line((32, top - 4), (32, top + step * 7))
    for number, (name, note) in enumerate(moments):
        y = top + number * step
        is_commit = number == commit
        it.dot(32, y, 8 if is_commit else 5, "c" if is_commit else "box")
        it.text(50, y + 1, name, "ink bold" if is_commit else "ink")
        it.text(50, y + 17, note, "dim small")
    it.line((20, middle), (426, middle), style="line dashed")
    return it.svg()


def draw_reshard() -> str:
    """One array, saved on 4×2 and restored on 2×4."""
    it = Drawing("Restoring on 2×4 an array that was saved on 4×2", 444)
    cell, left, right, top = 21, 28, 244, 62
    it.text(112, 28, "saved on x=4, y=2", "ink bold middle")
    it.text(328, 28, "restored on x=2, y=4", "ink bold middle")
    it.text(112, 48, "one file per device", "dim middle")
    it.text(328, 48, "device 0 needs w[0:4, 0:2]", "dim middle")
    for row in range(8):
        for column in range(8):
            is_needed = row < 4 and column < 2
            style = ("b" if row < 2 else "d") if is_needed else "faint"
            for corner in (left, right):
                it.box(corner + column * cell, top + row * cell, cell, cell, style, 0)
    for row in range(4):
        for column in range(2):
            x, y = left + column * 4 * cell, top + row * 2 * cell
            it.box(x, y, 4 * cell, 2 * cell, "line", 0)
            it.text(x + 2.9 * cell, y + cell + 5, str(row * 2 + column), "ink bold middle")
    for row in range(2):
        for column in range(4):
            x, y = right + column * 2 * cell, top + row * 4 * cell
            it.box(x, y, 2 * cell, 4 * cell, "line", 0)
            it.text(x + cell, y + 2 * cell + 5, str(row * 4 + column), "ink bold middle")
    it.arrow((204, top + 84), (236, top + 84))
    it.text(20, 262, "The ranges in the files", "ink bold")
    for number, (device, style) in enumerate(((0, "b"), (2, "d"))):
        y = 276 + number * 58
        it.text(20, y + 15, f"shard_{device:05}", "ink code")
        it.box(100, y, 64, 22, "box", 0)
        it.text(132, y + 15, "header", "dim code middle")
        for element in range(8):
            row, column = divmod(element, 4)
            is_needed = column < 2
            x = 164 + element * 32
            it.box(x, y, 32, 22, style if is_needed else "box", 0)
            label = f"{device + row},{column}"
            it.text(x + 16, y + 15, label, ("ink" if is_needed else "dim") + " code middle")
        it.text(164, y + 38, f"w[{device}:{device + 2}, 0:4], row by row", "dim code")
    it.lines(
        20,
        402,
        (
            "Device 0 needs four ranges of two files. The blocks of",
            "about 4 MiB that hold them are read and verified whole.",
        ),
        "dim",
    )
    return it.svg()


def draw_retention() -> str:
    """The steps that retention keeps."""
    kept = {300: "keep_best", 500: "keep_every", 800: "keep", 900: "keep", 1000: "keep"}
    styles = {"keep": "a", "keep_every": "b", "keep_best": "c"}
    it = Drawing("The steps that are kept after step 1000", 250)
    it.text(20, 28, "The run directory after step 1000", "ink bold")
    it.text(20, 48, 'Manager("runs/a", keep=3, keep_every=500, keep_best="loss")', "dim code")
    it.line((20, 112), (420, 112))
    for number, step in enumerate(range(100, 1100, 100)):
        x = 40 + number * 40
        reason = kept.get(step)
        if reason:
            it.dot(x, 112, 13, styles[reason])
        else:
            it.dot(x, 112, 13, "faint dashed")
        it.text(x, 146, str(step), ("ink bold" if reason else "dim") + " code middle")
    it.text(120, 86, "lowest loss", "dim middle")
    it.text(220, 86, "multiple of 500", "dim middle")
    it.text(360, 86, "newest 3", "dim middle")
    legend = (
        ("a", "keep=3: the newest three steps"),
        ("b", "keep_every=500: 500 and 1000"),
        ("c", 'keep_best="loss": the step with the lowest loss'),
        ("faint dashed", "deleted, once a newer step was committed"),
    )
    for number, (style, text) in enumerate(legend):
        y = 176 + number * 19
        it.dot(40, y - 4, 6, style)
        it.text(56, y, text)
    return it.svg()


def draw_parity() -> str:
    """Twelve files of four hosts, their groups, and the hosts of the parity files."""
    hosts, per_host = 4, 3
    count = hosts * per_host
    files = [FileEntry(device, 0, 0, 1 << 20) for device in range(count)]
    process_of = [device // per_host for device in range(count)]
    planned = plan_parity(files, process_of, range(hosts), count=1)
    group_of = {row: n for n, group in enumerate(planned.groups) for row in group.members}
    it = Drawing("Parity groups over four hosts", 296)
    it.text(20, 28, "parity=1 on four hosts", "ink bold")
    it.text(20, 47, "One colour is one group: three shard files and their parity.", "dim")
    for host in range(hosts):
        x = 20 + host * 102
        it.box(x, 60, 94, 158, "faint", 6)
        it.text(x + 47, 78, f"host {host}", "ink middle")
        for number in range(per_host):
            row = host * per_host + number
            it.file(x + 3, 86 + number * 28, 88, f"shard_{row:05}", GROUPS[group_of[row]])
    for number, group in enumerate(planned.groups):
        x, y = 20 + group.writers[0] * 102 + 3, 182
        it.box(x, y, 88, 26, GROUPS[number], 13)
        it.text(x + 44, y + 17, f"parity_{number:05}", "ink code middle")
    it.lines(
        20,
        242,
        (
            "Each group has at most one file on each host.",
            "Lose host 2: each group lost one file, and the other three",
            "reconstruct it.",
        ),
        "ink",
    )
    return it.svg()


def draw_mirror() -> str:
    """A run, its mirror, and a reader that watches it."""
    it = Drawing("A run with a mirror, and an evaluator that watches it", 384)
    it.box(20, 20, 400, 50, "a", 6)
    it.text(220, 41, "training run", "ink bold middle")
    it.text(220, 59, 'Manager("runs/a", keep=2, mirror="s3://bucket/a")', "ink code middle")
    it.arrow((220, 70), (220, 112))
    it.text(230, 96, "saves in the background", "dim")
    it.box(90, 116, 260, 84, "faint", 6)
    it.text(100, 134, "run directory runs/a", "ink")
    for number, (name, style) in enumerate((("300", "d"), ("400", "box"), ("500", "box"))):
        it.file(100 + number * 82, 144, 76, f"step_{name}", style)
    it.text(100, 188, "_LEASE-…-step-300", "ink code")
    it.arrow((140, 200), (140, 268))
    it.lines(20, 226, ("each process", "copies its files"), "dim")
    it.arrow((300, 268), (300, 204))
    it.lines(312, 226, ("watch() yields", "committed steps"), "dim")
    for left, style, name, facts in (
        (20, "c", "mirror", ("verified copies of steps", "It deletes none of them.")),
        (224, "d", "evaluator", ("has a lease on step 300", "Retention keeps the step.")),
    ):
        it.box(left, 272, 196, 72, style, 6)
        it.text(left + 98, 293, name, "ink bold middle")
        it.lines(left + 98, 314, facts, "ink middle")
    it.text(220, 367, "Saves wait for neither of them.", "ink middle")
    return it.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "layout": draw_layout,
    "commit": draw_commit,
    "reshard": draw_reshard,
    "retention": draw_retention,
    "parity": draw_parity,
    "mirror": draw_mirror,
}


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        (FOLDER / f"{name}.svg").write_text(PICTURES[name](), "utf-8")
