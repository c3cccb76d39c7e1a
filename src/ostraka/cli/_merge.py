"""`ostraka merge`: make one checkpoint of several."""

from __future__ import annotations

from typing import Any

import click

from ostraka.cli._arguments import flag, json_option, option, parsed, path_argument, repeated
from ostraka.cli._output import echo_report, progress
from ostraka.errors import PathInTheWay
from ostraka.storage import open_store


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def _rule(text: str) -> tuple[str, int]:
    pattern, _, number = text.rpartition("=")
    if not pattern or not number.isdecimal():
        raise ValueError(text)
    return pattern, int(number)


@click.command()
@path_argument("sources", metavar="SRC...", nargs=-1, required=True)
@path_argument("target", metavar="DST")
@option(
    "--weights",
    parsed("W,W,...", _numbers, "is no list of numbers, such as 1,2,1"),
    "The weight of each SRC in the average.",
)
@option("--ema", float, "Average as an EMA, the oldest SRC first.", metavar="DECAY")
@option("--lora", float, "Add the adapters in the second SRC.", metavar="SCALE")
@repeated(
    "--take",
    parsed("PATTERN=N", _rule, "is no PATTERN=N, such as 'head/**=1'"),
    "Take leaves unchanged from SRC number N, counted from 0.",
)
@repeated("--only", "PATTERN", "Merge these leaves.")
@option("--dtype", str, "Save floating-point arrays as this dtype.")
@option("--compress", "zstd", "Compress the result.")
@flag(
    "--overwrite", "Replace the Ostraka checkpoint at DST. It stays until the new one is complete."
)
@json_option("Print the result as JSON.")
def merge(
    sources: tuple[str, ...],
    target: str,
    overwrite: bool,
    take: tuple[tuple[str, int], ...],
    only: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Make one checkpoint, DST, of several.

    Floating-point and complex arrays are averaged: equally, by --weights, or as an exponential
    moving average with --ema. All other leaves (integers, bools, PRNG keys, Python values) are
    those of the last SRC. With --lora the first SRC is a base, the second has its adapters (lora_a
    and lora_b), and SCALE times their product is added to each kernel. Memory use is bounded.
    Dtypes and shardings stay the same. DST must not exist, unless you give --overwrite.

    \b
    Examples:
      ostraka merge runs/90 runs/95 runs/100 soup
      ostraka merge runs/90 runs/100 average --weights 1,3
      ostraka merge base adapters merged --lora 2
      ostraka merge a b both --take 'head/**=1' --take '**=0'
    """
    store = open_store(target)
    is_file = not store.exists() and store.look("") is not None
    if not overwrite and (is_file or store.list()):
        raise PathInTheWay(
            f"{store.location} exists already; merge to another path, or give --overwrite"
        )
    from ostraka.transfer.convert import merge  # with JAX, which the other commands do without

    with progress(f"merging to {target}") as bar:
        report = merge(
            sources, target, take=dict(take) or None, only=only or None, on_bytes=bar, **options
        )
    echo_report(report, as_json=as_json)
