"""`ostraka report`: checkpoints, runs and comparisons as one page to look at."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ostraka.cli._arguments import flag, json_option, names_option, option, path_argument
from ostraka.cli._output import echo, echo_json, human_size, progress
from ostraka.errors import printable, store_error

if TYPE_CHECKING:
    from ostraka.report.schema import Document

# The parts of a report are imported where they are used: other commands must not wait for them.


@click.command()
@path_argument("path", nargs=-1, required=True)
@option("-o --output", "FILE", "The page to write.", default="report.html", show_default=True)
@flag("--compare", "Show how the weights differ: of two checkpoints, or along the steps of a run.")
@click.option(
    "--values/--no-values",
    default=None,
    help="Read the arrays for histograms, NaN counts and slices. Default: up to 1 GiB.",
)
@flag("--verify verified", "Read every byte and compare it with its checksum.")
@names_option("Show tensors of files as the leaves that a restore makes of them")
@json_option("Print the documents that the page shows, and write no page.")
def report(
    path: tuple[str, ...],
    output: str,
    compare: bool,
    values: bool | None,
    verified: bool,
    names: Any,
    as_json: bool,
) -> None:
    """Write a page that shows each PATH: a run directory or a checkpoint.

    The page is one HTML file. It loads nothing, so you can send it, print it, and open it without a
    network. A run shows its steps, metrics, sizes and save times. A checkpoint shows its tree, its
    shards, its files and its values. ostraka plan --report writes the page of a plan.

    With --compare, give two checkpoints, or one run directory. The page then shows the relative
    change of the weights by layer and role, and names frozen, dead and exploding layers.

    \b
    Examples:
      ostraka report runs/a
      ostraka report runs/a/100 -o step-100.html
      ostraka report --compare runs/a/100 runs/a/200
      ostraka report --compare runs/a -o changes.html
      ostraka report runs/a --json | jq '.documents[0].steps[-1].metrics'
    """
    if not as_json:
        check_output(output)
    documents = _documents(path, compare, values, verified, names)
    if as_json:
        echo_json({"documents": documents})
    else:
        title = ", ".join(printable(one) for one in path)
        write_page(output, f"{title} – ostraka", documents)


def _documents(
    paths: tuple[str, ...], compare: bool, values: bool | None, verified: bool, names: Any
) -> list[Document]:
    from ostraka.report.checkpoint import describe_checkpoint
    from ostraka.report.run import describe_run
    from ostraka.report.steps import is_run

    if compare:
        from ostraka.report.comparison import describe_changes, describe_comparison

        if len(paths) == 1 and is_run(paths[0]):
            return [describe_changes(paths[0], progress=progress)]
        if len(paths) == 2:
            return [describe_comparison(*paths, names=names, progress=progress)]
        raise click.UsageError("--compare takes two checkpoints, or one run directory")
    return [
        describe_run(one, verified=verified)
        if is_run(one)
        else describe_checkpoint(
            one, names=names, values=values, verified=verified, progress=progress
        )
        for one in paths
    ]


def check_output(output: str) -> None:
    """Raise UsageError if no page can be written there, before anything is read for it."""
    if Path(output).is_dir():
        raise click.UsageError(
            f"{printable(output)} is a directory; name the page, such as report.html"
        )
    folder = Path(output).parent
    if not folder.is_dir():
        raise click.UsageError(
            f"there is no directory {printable(str(folder))} for the page; make it first"
        )


def _replace(path: Path, data: bytes) -> None:
    """Write a file whole: one that is there stays if the disk is full."""
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_bytes(data)
        return
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path.resolve())
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_page(output: str, title: str, documents: list[Document]) -> None:
    """Write the page of some documents to a file, and say so."""
    from ostraka.report.page import render

    text = render({"title": title, "at": time.time(), "documents": documents, "live": None})
    try:
        _replace(Path(output), text.encode())
    except OSError as error:
        raise store_error("write", output, error) from error
    echo(f"{printable(output)}  {human_size(len(text.encode()))}")
