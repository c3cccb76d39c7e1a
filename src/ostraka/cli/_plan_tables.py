"""The document of `ostraka plan` as tables and bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ostraka.cli._output import echo_text, human_size
from ostraka.errors import count_of, printable

_BAR_WIDTH = 24
_BLOCK = "█"
_PIPE_WIDTH = 120
PlanLine = tuple[str, str, str]


def print_document(document: dict[str, Any]) -> None:
    """Print every variant, and the comparison."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_WIDTH)
    with console.capture() as printed:
        for variant in document["variants"]:
            _print_variant(console, variant)
        if document["comparison"]:
            _print_comparison(console, document)
    echo_text(printed.get().removesuffix("\n"))


def _print_variant(console: Console, variant: dict[str, Any]) -> None:
    console.print(f"[bold]{_shown(variant['title'])}[/bold]  {_shown(_where(variant))}")
    for name, text in _summary(variant):
        console.print(f"[dim]{name:10}[/dim]  {_shown(text)}")
    console.print()
    # Some encodings have no block character for bars.
    block = "#" if _BLOCK.encode(console.encoding, "replace") == b"?" else _BLOCK
    for title, rows in _sections(variant):
        if listed := list(rows):
            console.print(_table(title, listed, block))
            console.print()
    for finding in variant["findings"]:
        colour = "red" if finding["severity"] == "error" else "yellow"
        console.print(f"[{colour}]{finding['severity']}[/{colour}] {_shown(finding['message'])}")
    if variant["findings"]:
        console.print()
    for limit in variant["limits"]:
        colour, word = ("green", "within") if limit["ok"] else ("red", "exceeds")
        sizes = f"{human_size(limit['found_bytes'])}, limit {human_size(limit['limit_bytes'])}"
        console.print(f"[{colour}]{word} --{limit['name'].replace('_', '-')}[/{colour}]: {sizes}")


def _summary(variant: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What most people want to know, in six lines. The tables below have the details."""
    parameters, parity = variant["parameters"], variant["parity"]
    elements = f"{variant['elements']:,} elements in {count_of(variant['arrays'], 'array')}"
    yield "parameters", elements if parameters is None else f"{parameters:,}"
    written = human_size(variant["total_bytes"])
    if variant["compressed"] is not None:
        written = f"{human_size(variant['compressed']['total_bytes'])} of {written} uncompressed"
    if parity is not None:
        written += f", {human_size(parity['bytes'])} of them parity"
    yield "bytes", written
    files = variant["files"]
    largest = files["largest"]
    most = "" if largest is None else f", the largest {human_size(largest['bytes'])}"
    yield "files", f"{files['in_all']:,}{most}"
    yield "per host", f"{human_size(round(variant['host_bytes']['most']))} at most"
    save_s, restore_s = variant["save"]["duration_s"], variant["restore"]["duration_s"]
    times = f"save {_seconds(save_s)}, restore {_seconds(restore_s)}"
    unknown = save_s is None and restore_s is None
    yield "time", "unknown; give a bandwidth, or --probe DIR" if unknown else times
    yield "recovery", _recovery(variant)


def _recovery(variant: dict[str, Any]) -> str:
    """What may be lost without another copy, and how long a new host takes."""
    host, parity = variant["recovery"]["lost_host"], variant["parity"]
    back = f"a new host reads {human_size(host['held_bytes'])}"
    if host["duration_s"] is not None:
        back += f" in {_seconds(host['duration_s'])}"
    if parity is None or parity["covers"] is None:
        return f"{back}; lost files need a copy, or --parity"
    one = {"hosts": "host", "processes": "process", "files": "shard file"}[parity["covers"]]
    lost = one if parity["count"] == 1 else {"process": "processes"}.get(one, f"{one}s")
    return f"{back}; parity covers any {parity['count']} {lost}"


def _axes(mesh: dict[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in mesh.items())


def _where(variant: dict[str, Any]) -> str:
    meshes = [_axes(mesh) for mesh in variant["meshes"] if mesh]
    mesh = f"mesh {'; '.join(meshes)}, " if meshes else ""
    return f"{mesh}{count_of(variant['devices'], 'device')} on {count_of(variant['hosts'], 'host')}"


def _table(title: str, rows: Sequence[PlanLine], block: str) -> Table:
    table = Table(title=_shown(title), title_justify="left", title_style="bold cyan", box=None)
    table.show_header = False
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    for name, value, note in rows:
        table.add_row(_shown(name), _shown(value), _shown(note.replace(_BLOCK, block)))
    return table


def _sections(variant: dict[str, Any]) -> Iterator[tuple[str, Iterator[PlanLine]]]:
    yield "what is saved", _saved_rows(variant)
    yield "what is written", _written_rows(variant)
    yield "save", _save_rows(variant)
    yield "restore as it was", _restore_rows(variant["restore"])
    for onto in variant["onto"]:
        title = f"restore onto {_axes(onto['mesh'])}, {count_of(onto['hosts'], 'host')}"
        yield title, _restore_rows(onto)
    yield "if something is lost", _recovery_rows(variant["recovery"])
    yield "over time", _time_rows(variant)


def _saved_rows(variant: dict[str, Any]) -> Iterator[PlanLine]:
    if variant["parameters"] is not None:
        yield "parameters", f"{variant['parameters']:,}", ""
    yield "arrays", f"{variant['arrays']:,}", f"{variant['elements']:,} elements"
    yield "bytes", human_size(variant["data_bytes"]), f"{variant['data_bytes']:,}"
    groups = variant["groups"]
    most = max((group["bytes"] for group in groups.values()), default=0)
    dtypes = {name: ", ".join(group["dtypes"]) for name, group in groups.items()}
    width = max(map(len, dtypes.values()), default=0)
    for name, group in groups.items():
        note = f"{dtypes[name]:{width}}  {_bar(group['bytes'], most)}"
        yield f"  {name}", human_size(group["bytes"]), note
    wider = variant["data_bytes_in_float32"]
    if wider is not None and wider["optimizer"] > variant["data_bytes"]:
        note = "--optimizer-dtype float32; optax takes the parameters' dtype"
        yield "with float32 moments", human_size(wider["optimizer"]), note
    if wider is not None:
        note = "--dtype float32, if the parameters are kept in float32"
        yield "all in float32", human_size(wider["everything"]), note


def _written_rows(variant: dict[str, Any]) -> Iterator[PlanLine]:
    files, compressed = variant["files"], variant["compressed"]
    before = " before compression, as all sizes below" if compressed else ""
    yield "in all", human_size(variant["total_bytes"]), f"{variant['total_bytes']:,}{before}"
    if compressed is not None:
        size = compressed["total_bytes"]
        estimate = f"an estimate: {size / variant['total_bytes']:.2f}, for normal weights"
        note = estimate if compressed["is_estimate"] else f"{size:,}"
        yield "compressed", human_size(size), note
    yield from _parity_rows(variant["parity"])
    yield "files", f"{files['in_all']:,}", f"{files['shards']:,} of them shards"
    if files["largest"] is not None:
        yield "largest file", human_size(files["largest"]["bytes"]), files["largest"]["name"]
    for what, sizes in (("device", variant["shard_bytes"]), ("host", variant["host_bytes"])):
        for name in ("least", "mean", "most"):
            size = round(sizes[name])
            yield f"a {what}, {name}", human_size(size), _bar(size, sizes["most"])
    yield "skew of hosts", f"{variant['host_bytes']['skew']:.2%}", ""
    exact = "" if variant["index_bytes_are_exact"] else "from the indexes of a few processes"
    yield "metadata", human_size(variant["metadata_bytes"]), f"{variant['metadata_bytes']:,}"
    yield "indexes", human_size(variant["index_bytes"]), exact


def _parity_rows(parity: dict[str, Any] | None) -> Iterator[PlanLine]:
    if parity is None:
        return
    share = f"{parity['share']:.1%} more, in {count_of(parity['files'], 'file')}"
    yield "parity", human_size(parity["bytes"]), share
    if parity["covers"] is not None:
        number, what = parity["count"], parity["covers"]
        one = {"hosts": "host", "processes": "process", "files": "shard file"}[what]
        noun = one if number == 1 else {"files": "shard files"}.get(what, what)
        note = "all files of it" if what != "files" else "too few hosts to stand the loss of one"
        yield "  stands the loss of", f"any {number} {noun}", note
    back = parity["read_back_bytes"]["most"]
    if back:
        yield "  a host reads back", human_size(back), "before the commit, at most"


def _save_rows(variant: dict[str, Any]) -> Iterator[PlanLine]:
    save, staging = variant["save"], variant["staging_bytes"]
    yield "staging memory of a host", human_size(staging["accelerators"]), "with accelerators"
    yield "", human_size(staging["cpu"]), "on CPUs"
    held = human_size(staging["held_by_save_async"])
    yield "held by save_async", held, "with accelerators: a copy of all that a host's devices hold"
    yield _time_row(save)
    if save["duration_s"] is not None:
        yield "blocked by save", _seconds(save["blocked_s"]), "save returns when all is on disk"
    if save["save_async_blocked_s"] is not None:
        seconds = _seconds(save["save_async_blocked_s"])
        yield "blocked by save_async", seconds, "until all is copied to host memory"
    requests = save["requests"]
    note = f"in a bucket; {requests['in_all']:,} in all"
    yield "requests of a host", f"{requests['most']:,}", note
    yield from _peak_rows(save)


def _peak_rows(work: dict[str, Any]) -> Iterator[PlanLine]:
    for key, what in (("_host", "a host"), ("", "all hosts")):
        rate = work[f"peak_bytes_per_second{key}"]
        if rate is not None:
            yield f"peak I/O, {what}", f"{human_size(round(rate))}/s", ""


def _restore_rows(work: dict[str, Any]) -> Iterator[PlanLine]:
    read, looked_at = work["read_bytes"], work["hosts_worked_out"]
    is_sampled = looked_at < work["hosts"]
    sampled = "" if not is_sampled else f"worked out for {count_of(looked_at, 'host')}"
    # One of the hosts that were not computed may read a little more.
    title = "a host reads, about" if is_sampled else "a host reads, at most"
    yield title, human_size(read["most"]), sampled
    yield "over-read", f"{work['over_read']:.2%}", "headers, and whole blocks for parts of them"
    in_files = f"in {count_of(work['files']['most'], 'file')}"
    yield "reads of a host", f"{work['ranges']['most']:,}", in_files
    yield "requests of a host", f"{work['requests']['most']:,}", "in a bucket"
    yield "to open it", human_size(work["opening_bytes"]), "metadata and indexes"
    yield _time_row(work)
    yield from _peak_rows(work)


def _recovery_rows(recovery: dict[str, Any]) -> Iterator[PlanLine]:
    shard, host, disk = (recovery[name] for name in ("lost_shard", "lost_host", "lost_disk"))
    if shard is not None:
        elsewhere = human_size(shard["held_elsewhere_bytes"])
        note = (
            f"{_seconds(shard['duration_s'])} to write; {elsewhere} of it is on other devices, too"
        )
        yield "a shard", human_size(shard["size_bytes"]), note
    alone = human_size(host["sole_bytes"])
    note = f"{_seconds(host['duration_s'])} to read; {alone} of it is on no other host"
    yield "a host", human_size(host["held_bytes"]), note
    elsewhere = human_size(disk["held_elsewhere_bytes"])
    note = f"{_seconds(disk['duration_s'])} to write; {elsewhere} of it is on other hosts, too"
    yield "a host's disk", human_size(disk["written_bytes"]), note


def _time_rows(variant: dict[str, Any]) -> Iterator[PlanLine]:
    kept, interval, write_s = (
        variant["retention"],
        variant["interval"],
        variant["save"]["duration_s"],
    )
    if kept is not None:
        during = f"{human_size(kept['bytes_while_saving'])} while one more is saved"
        yield f"storage for {kept['keep']}", human_size(kept["bytes"]), during
    if interval is None:
        return
    counted = "" if interval["restore_is_counted"] else ", restoring not counted"
    for call in ("save", "save_async"):
        advice = interval[call]
        if advice is None:
            note = "--device-bandwidth tells how long it blocks; the write runs in the background"
            yield f"{call} every", "unknown", note
            continue
        note = f"blocked {_seconds(advice['blocked_s'])}; {advice['lost_share']:.1%} of time lost"
        if advice["interval_s"] > advice["daly_s"]:
            note += f"; no faster than the write, {_seconds(write_s)}"
        yield f"{call} every", _seconds(advice["interval_s"]), f"{note}{counted}"


def _print_comparison(console: Console, document: dict[str, Any]) -> None:
    names = [variant["title"] for variant in document["variants"]]
    table = Table(title="compared", title_justify="left", title_style="bold cyan", box=None)
    table.add_column("", style="dim")
    for name in names:
        table.add_column(_shown(name), justify="right")
    table.add_column("best")
    for row in document["comparison"]:
        cells = [_cell(row["key"], row["values"][name]) for name in names]
        best = ", ".join(row["best"]) or ("equal" if row["equal"] else "equal within 1%")
        table.add_row(row["title"], *cells, _shown(best))
    console.print(table)


def _cell(key: str, value: Any) -> str:
    if key.endswith("skew"):
        return f"{value:.2%}"
    if key.endswith("duration_s"):
        return _seconds(value)
    return f"{value:,}" if key == "files.shards" else human_size(value)


def _shown(text: str) -> str:
    """Escape untrusted text of a checkpoint: no terminal control codes, no rich markup."""
    return escape(printable(text))


def _bar(size: int, most: int) -> str:
    return _BLOCK * max(round(_BAR_WIDTH * size / most), 1 if size else 0) if most else ""


def _seconds(value: float | None) -> str:
    if value is None:
        return "unknown"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def _time_row(work: dict[str, Any]) -> PlanLine:
    hint = "give a bandwidth, or --probe DIR" if work["duration_s"] is None else ""
    return "time", _seconds(work["duration_s"]), hint
