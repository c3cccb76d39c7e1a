"""The `ostraka` command. Only `convert` and `merge` import JAX, and `plan` for a Python function.

Results go to stdout, an error goes to stderr as one line.
"""

from __future__ import annotations

import click

from ostraka._version import __version__
from ostraka.cli._errors import Commands

__all__ = ["main"]

# To add a command `x`, write a module `_x` that has a click command `x`, and name it here with the
# first sentence of its help, which `ostraka --help` shows without importing the module.
_SECTIONS = {
    "Inspect": {
        "show": "Show what the checkpoint at PATH holds",
        "ls": "List the steps in the directory ROOT",
        "diff": "Show how checkpoints A and B differ",
        "verify": "Verify the checkpoints at each PATH",
        "du": "Show how many bytes the checkpoints at each PATH take",
        "which": "Print the path of the newest committed step in DIRECTORY",
        "audit": "Tell the history of a run, or where it first differs from OTHER",
        "watch": "Print each step of the directory ROOT as it is committed",
        "doctor": "Check this machine, and the storage at PATH",
    },
    "Look": {
        "report": "Write a page that shows each PATH: a run directory or a checkpoint",
        "board": "Show the run in DIRECTORY in a browser while it goes on",
        "top": "Show the run in DIRECTORY in the terminal while it goes on",
    },
    "Change": {
        "copy": "Copy the checkpoint at SRC to DST",
        "convert": "Write the checkpoint at SRC in another format, to DST",
        "merge": "Make one checkpoint, DST, of several",
        "repair": "Repair the checkpoint at PATH, or all in a directory of steps",
        "pin": "Pin the step at each STEP_PATH, so that no run deletes it",
        "unpin": "Unpin the step at each STEP_PATH, so that a run may delete it",
        "rm": "Remove each STEP from the directory ROOT",
        "gc": "Remove the files of interrupted saves from ROOT",
    },
    "Plan": {
        "plan": "Show what a checkpoint of SOURCE will cost, without writing it",
    },
    "Shell": {
        "completion": "Print the script that makes SHELL complete ostraka's commands",
    },
}


@click.group(
    "ostraka",
    cls=Commands,
    sections=_SECTIONS,
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
      1    a difference, damage, NaN or infinity (show --nan), or a fault (doctor)
      2    wrong usage, or it can't be done: no such checkpoint, no permission
      3    a limit that was given is exceeded
      130  interrupted
      141  the reader of the output has closed the pipe
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
