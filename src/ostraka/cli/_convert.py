"""`ostraka convert`: write a checkpoint in another format."""

from __future__ import annotations

from typing import Any

import click

from ostraka.cli._arguments import (
    flag,
    json_option,
    names_option,
    option,
    parsed,
    path_argument,
    repeated,
)
from ostraka.cli._output import echo_report, progress

_FORMATS = ("ostraka", "orbax", "safetensors", "hf", "npz")


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not old or not equals:
        raise ValueError(text)
    return old, new


@click.command()
@path_argument("source", metavar="SRC")
@path_argument("target", metavar="DST")
@option("--to", click.Choice(_FORMATS), "What DST is to be.", required=True)
@names_option("How leaves and tensors correspond")
@repeated("--only", "PATTERN", "Convert these leaves.")
@option("--dtype", str, "Write floating-point arrays as this dtype.")
@option("--compress", "zstd", "Compress the result; for --to ostraka.")
@flag("--key-data", "Write RNG state, PRNG keys as their integers.")
@repeated(
    "--rename",
    parsed("OLD=NEW", _pair, "is no OLD=NEW, such as model=transformer"),
    "Tensors of leaves below OLD begin with NEW; 'OLD=' drops it.",
)
@option("--config", "FILE", "The config.json of the result; for --to hf.")
@json_option("Print the result as JSON.")
def convert(
    source: str,
    target: str,
    only: tuple[str, ...],
    rename: tuple[tuple[str, str], ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Write the checkpoint at SRC in another format, to DST.

    SRC is an Ostraka or Orbax checkpoint, or a directory of safetensors files. DST must not exist:
    it appears once it is complete. Memory use is bounded, and everything is read back and compared.
    If the command was killed, run it again to resume.

    \b
    --to ostraka      an Ostraka checkpoint
    --to orbax        a directory for Orbax, or a step if its name is 100 or step_100
    --to safetensors  whole tensors, in one file if DST ends in .safetensors
    --to hf           files and index as Hugging Face writes them
    --to npz          one file for numpy.load

    The last three hold only tensors. RNG state, such as that of Dropout, is left out, and a note
    says so. Without --names, --to hf names tensors by the paths of leaves, with dots. config.json
    comes from --config, or from SRC if it has one.

    \b
    Examples:
      ostraka convert orbax_run/100 runs/100 --to ostraka
      ostraka convert runs/100 weights --to hf --only model --names llama --dtype bfloat16
      ostraka convert runs/100 weights --to hf --only model --rename model= --config config.json
      ostraka convert llama/ runs/0 --to ostraka --names hf
      ostraka convert runs/100 weights.npz --to npz --only 'model/**' --dtype float32
    """
    from ostraka.transfer.convert import convert  # with JAX, which the other commands do without

    with progress(f"converting {source}") as bar:
        report = convert(
            source,
            target,
            only=only or None,
            rename=dict(rename) or None,
            on_bytes=bar,
            **options,
        )
    echo_report(report, as_json=as_json)
