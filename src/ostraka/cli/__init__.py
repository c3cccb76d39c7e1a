"""The `ostraka` command. Only `convert` and `merge` import JAX, and `plan` for a Python function.

Results go to stdout, an error as one line to stderr.
"""

from __future__ import annotations

import click

from ostraka._version import __version__
from ostraka.cli._errors import Commands

__all__ = ["main"]

# A line for each command: the module that has a click command of the same name.
_HOMES = {
    "completion": "ostraka.cli._completion",
    "convert": "ostraka.cli._convert",
    "copy": "ostraka.cli._copy",
    "diff": "ostraka.cli._diff",
    "gc": "ostraka.cli._gc",
    "ls": "ostraka.cli._ls",
    "merge": "ostraka.cli._merge",
    "plan": "ostraka.cli._plan",
    "repair": "ostraka.cli._repair",
    "rm": "ostraka.cli._rm",
    "show": "ostraka.cli._show",
    "verify": "ostraka.cli._verify",
    "watch": "ostraka.cli._watch",
}


@click.group(
    "ostraka",
    cls=Commands,
    homes=_HOMES,
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
      0    all is well
      1    a difference, damage, or with show --nan a NaN or infinity was found
      2    wrong usage, or it can't be done: nothing there, no permission
      3    a limit that was given is exceeded
      130  interrupted
      141  the reader of the output has closed the pipe
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
