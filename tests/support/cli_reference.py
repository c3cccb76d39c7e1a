"""The reference of the command, from its own help: `python tests/support/cli_reference.py`."""

from __future__ import annotations

import click

from ostraka.cli import main

_HEAD = """# The command

<!-- Made by `python tests/support/cli_reference.py > docs/reference/cli.md`; a test compares. -->

Every command that prints data prints it as JSON with `--json`. The key `schema` has the version of
all other keys, which is 1. Results go to stdout, an error is one line on stderr, and `-v` adds its
traceback. Progress bars appear on a terminal only. Colours are left out if the output is not a
terminal, if `TERM=dumb`, and if `NO_COLOR` is set. `FORCE_COLOR` forces them. No command imports
JAX to look at a checkpoint.

On a terminal, output that is longer than the screen goes through the pager in `OSTRAKA_PAGER` or
`PAGER`, which is `less` by default. `--no-pager`, an empty name and `cat` turn it off. Tables fit
the width of the screen. `COLUMNS` and `LINES` set its size, also for output that is not on a
terminal.

`rm`, `gc` and `repair` ask before they change anything. `--yes` answers for you, `--dry-run` shows
what would be done. Where nobody can be asked, they refuse without `--yes`.
"""
_WIDTH = 90


def reference() -> str:
    """All of `docs/reference/cli.md`."""
    root = click.Context(main, info_name="ostraka", terminal_width=_WIDTH)
    parts = [_HEAD, _section("ostraka", root)]
    for name in main.list_commands(root):
        command = main.get_command(root, name)
        assert command is not None
        context = click.Context(command, root, name, terminal_width=_WIDTH)
        parts.append(_section(f"ostraka {name}", context))
    return "\n".join(parts)


def _section(title: str, context: click.Context) -> str:
    context.help_option_names = ["-h", "--help"]
    lines = (line.rstrip() for line in context.get_help().splitlines())
    return "\n".join([f"## {title}", "", "```text", *lines, "```", ""])


if __name__ == "__main__":
    click.echo(reference(), nl=False)
