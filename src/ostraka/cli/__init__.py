"""The `ostraka` command. Only `plan` imports JAX, and only for what is not a checkpoint.

Exit codes: 0 all is well, 1 the checkpoint is damaged, 2 the command could not do what was asked
(wrong usage, nothing there). What was asked for goes to stdout, an error as one line to stderr.
"""

from __future__ import annotations

import click

from ostraka._version import __version__
from ostraka.cli._errors import OneLineErrors
from ostraka.cli._plan import plan
from ostraka.cli._show import show
from ostraka.cli._verify import verify

__all__ = ["main"]


@click.group(
    "ostraka",
    cls=OneLineErrors,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """Look at Ostraka checkpoints, and prove them intact.

    \b
    Examples:
      ostraka show runs/7
      ostraka verify runs/7
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


main.add_command(plan)
main.add_command(show)
main.add_command(verify)
