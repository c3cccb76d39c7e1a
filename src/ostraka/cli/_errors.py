"""How the command reports errors that the library raises: one line, and an exit code."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from errno import EACCES, EPERM
from importlib import import_module
from typing import Any

import click

from ostraka.cli._output import PAGER_OFF, echo, echo_lines
from ostraka.errors import CheckpointNotFound, Damaged, OstrakaError, nearest

DIFFERENT = 1
DAMAGED = 1
FAILED = 2
INTERRUPTED = 130
READER_GONE = 141
"""128 + SIGPIPE, as a shell reports a closed pipe."""

_REASONS_SHOWN = 3

_VERBOSE = "ostraka.verbose"


class Commands(click.Group):
    """A group whose errors, its own and the library's, are one line on stderr.

    A command is imported when it is called, so that none waits for the imports of another. The help
    of the group has the sentence for each command from `sections`.
    """

    def __init__(self, *arguments: Any, sections: Mapping[str, Mapping[str, str]], **options: Any):
        super().__init__(*arguments, **options)
        self._sections = sections
        self.params += _common_options()

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in self._sections.values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.list_commands(ctx) and cmd_name not in self.commands:
            command = getattr(import_module(f"ostraka.cli._{cmd_name}"), cmd_name)
            command.params += _common_options()
            self.add_command(command)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in self._sections.items():
            with formatter.section(title):
                # All sections have columns of the same width.
                longest = max(map(len, self.list_commands(ctx)))
                formatter.write_dl([(name.ljust(longest), text) for name, text in commands.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            close = nearest(args[0], self.list_commands(ctx))
            raise click.UsageError(f"there is no command {args[0]!r}{close}", ctx)
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        try:
            return super().make_context(*args, **extra)
        except BrokenPipeError:  # while it printed its help
            _discard_stdout()
            raise click.exceptions.Exit(READER_GONE) from None

    def invoke(self, ctx: click.Context) -> Any:
        ctx.color = _wants_colour()
        try:
            return super().invoke(ctx)
        except OstrakaError as error:
            # Here, since click would handle those that are also OSErrors itself.
            _fail(f"{error}{_remedy(error)}", ctx)
            ctx.exit(DAMAGED if isinstance(error, Damaged) else FAILED)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:
            # Not click's 1, which would say that damage was found.
            _discard_stdout()
            ctx.exit(READER_GONE)
        except Exception as error:
            # A bug, or an unexpected error of the operating system.
            hint = "" if ctx.meta.get(_VERBOSE) else "; -v shows where it comes from"
            _fail(f"{type(error).__name__}: {error}{hint}", ctx)
            ctx.exit(FAILED)

    def main(self, *args: Any, **options: Any) -> Any:
        name = options["prog_name"] = options.get("prog_name") or "ostraka"
        options["standalone_mode"] = False
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            # Print a replacement for characters that the encoding lacks, instead of failing.
            sys.stdout.reconfigure(errors="replace")
        try:
            code = super().main(*args, **options)
        except click.ClickException as error:
            ctx = getattr(error, "ctx", None)
            command = ctx.command_path if ctx else name
            message = error.format_message().rstrip(".")
            if isinstance(error, click.MissingParameter):  # with each choice on its own line
                message = " ".join(message.split())
            _fail(f"{message} (see {command} --help)", ctx)
            code = FAILED
        except click.Abort:
            _fail("interrupted", None)
            code = INTERRUPTED
        except BrokenPipeError:  # a shell that has stopped reading completions
            _discard_stdout()
            code = READER_GONE
        sys.exit(code)


def _discard_stdout() -> None:
    """Discard unwritten output, or Python would report an error when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _common_options() -> list[click.Parameter]:
    """The options that stand before and after the name of a command."""

    def flag(key: str, names: Sequence[str], help_text: str) -> click.Option:
        def remember(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
            ctx.meta[key] = wanted or ctx.meta.get(key, False)

        return click.Option(
            names, is_flag=True, expose_value=False, callback=remember, help=help_text
        )

    return [
        flag(PAGER_OFF, ["--no-pager"], "Show long output without a pager."),
        flag(_VERBOSE, ["-v", "--verbose"], "Show the full traceback on errors."),
    ]


def _wants_colour() -> bool | None:
    """The choice of the environment, or None to let the terminal decide."""
    if os.environ.get("FORCE_COLOR") and not os.environ.get("NO_COLOR"):
        return True
    return False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


def _remedy(error: OstrakaError) -> str:
    """The remedy for an error whose message has none."""
    if isinstance(error, Damaged):
        return "; ostraka verify lists all damage, ostraka repair repairs what it can"
    if isinstance(error, OSError) and error.errno in (EACCES, EPERM):
        return "; look at its permissions, or ask its owner"
    if isinstance(error, CheckpointNotFound) and "; " not in str(error):
        return "; give the directory that a save was given"
    return ""


def _fail(message: str, ctx: click.Context | None) -> None:
    if ctx is not None and ctx.meta.get(_VERBOSE):
        echo_lines(traceback.format_exc().rstrip("\n").split("\n"), err=True)
    # There may be a reason for each leaf, too many for one line.
    sentence, *reasons = message.splitlines() or [""]
    if len(reasons) > _REASONS_SHOWN:
        reasons = [*reasons[:_REASONS_SHOWN], "and more, which -v shows"]
    line = f"{sentence} {'; '.join(reasons)}"
    echo(f"ostraka: {' '.join(line.split())}", err=True)
