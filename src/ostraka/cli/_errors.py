"""The library raises; the command prints one line, and its exit code tells the kind."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from ostraka.errors import Damaged, OstrakaError

DAMAGED = 1
FAILED = 2
INTERRUPTED = 130


class OneLineErrors(click.Group):
    """A group whose errors, its own and the library's, are one line on stderr."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OstrakaError as error:
            # Here, because click takes those that are also OSErrors for its own.
            _fail(str(error))
            ctx.exit(DAMAGED if isinstance(error, Damaged) else FAILED)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        name = prog_name or "ostraka"
        try:
            code = super().main(
                args, name, complete_var, False, windows_expand_args=windows_expand_args, **extra
            )
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else name
            message = error.format_message().rstrip(".")
            _fail(f"{message} (see {command} --help)")
            code = FAILED
        except click.Abort:
            _fail("interrupted")
            code = INTERRUPTED
        sys.exit(code)


def _fail(message: str) -> None:
    click.echo(f"ostraka: {' '.join(message.split())}", err=True)
