"""`ostraka convert`: a checkpoint in another format."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from ostraka.cli._arguments import names_option, path_argument
from ostraka.cli._progress import progress
from ostraka.cli._text import echo_json, printable

_FORMATS = ("ostraka", "orbax", "safetensors", "hf", "npz")


@click.command()
@path_argument("source", metavar="SRC")
@path_argument("target", metavar="DST")
@click.option("--to", type=click.Choice(_FORMATS), required=True, help="What DST is to be.")
@names_option("How leaves and tensors correspond")
@click.option(
    "--only", multiple=True, metavar="PATTERN", help="Convert these leaves. Can be repeated."
)
@click.option("--dtype", help="Write floating-point arrays as this dtype.")
@click.option("--compress", metavar="zstd", help="Compress the result; for --to ostraka.")
@click.option("--key-data", is_flag=True, help="Write PRNG keys as their integers.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def convert(source: str, target: str, only: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Write the checkpoint at SRC in another format, to DST.

    SRC is a checkpoint of Ostraka's, of Orbax's, or a directory of safetensors files. DST must not
    be there. Nothing is held in memory as a whole, and everything is read back and compared. DST
    appears when all of it is there; run the same again after it was killed, and it goes on.

    \b
    --to ostraka      a checkpoint of Ostraka's
    --to orbax        a directory that Orbax restores; a step, if it is called 100 or step_100
    --to safetensors  whole tensors; one file if DST ends in .safetensors
    --to hf           files and index as Hugging Face writes them
    --to npz          one file for numpy.load

    \b
    Examples:
      ostraka convert orbax_run/100 runs/100 --to ostraka
      ostraka convert runs/100 weights --to hf --only model --names llama --dtype bfloat16
      ostraka convert llama/ runs/0 --to ostraka --names hf
      ostraka convert runs/100 weights.npz --to npz --only 'model/**' --dtype float32
    """
    from ostraka.interop import convert  # with JAX, which the other commands do without

    with progress(f"converting {printable(source)}") as bar:
        report = convert(source, target, only=only or None, on_bytes=bar.move_to, **options)
    if as_json:
        echo_json(dataclasses.asdict(report))
    else:
        click.echo(printable(str(report)))
