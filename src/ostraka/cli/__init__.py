"""The `ostraka` command. Only `convert` and `merge` import JAX, and `plan` for a Python function.

Results go to stdout, an error goes to stderr as one line.
"""

from __future__ import annotations

import click

from ostraka._version import __version__
from ostraka.cli._errors import Commands

__all__ = ["main"]

# To add a command `x`, write a module `_x` that has a click command `x`, and name it here.
_NAMES = [
    "completion",
    "convert",
    "copy",
    "diff",
    "gc",
    "ls",
    "merge",
    "plan",
    "repair",
    "rm",
    "show",
    "verify",
    "watch",
]


@click.group(
    "ostraka",
    cls=Commands,
    names=_NAMES,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """Plan, show, compare, copy, convert, verify and repair Ostraka checkpoints.

    \b
    Examples:
      ostraka show runs/7
      ostraka verify runs/7
      ostraka diff runs/6 runs/7
      ostraka ls runs
      ostraka copy runs s3://bucket/runs
      ostraka repair runs/7 --from s3://bucket/runs
      ostraka plan llama-3.1-8b --mesh data=64,model=8 --optimizer adamw

    \b
    Exit codes:
      0    success
      1    a difference, damage, or with show --nan a NaN or infinity was found
      2    wrong usage, or it can't be done: no such checkpoint, no permission
      3    a limit that was given is exceeded
      130  interrupted
      141  the reader of the output has closed the pipe
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
