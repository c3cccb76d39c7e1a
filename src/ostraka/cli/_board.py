"""`ostraka board`: a run directory, live in a browser."""

from __future__ import annotations

import re

import click

from ostraka.cli._arguments import option, path_argument
from ostraka.cli._output import echo
from ostraka.errors import printable
from ostraka.report.steps import await_root


def _token(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"[A-Za-z0-9_.~-]{16,200}", value):
        raise click.BadParameter("a token has 16 to 200 letters, digits and -_.~", ctx, param)
    return value


@click.command()
@path_argument("directory")
@option("--port", click.IntRange(0, 65535), "The port to listen on.  [default: any]", default=0)
@option(
    "--host",
    "ADDRESS",
    "The address to listen on. With any but a loopback address, others in the network who know "
    "the token can read the run.",
    default="127.0.0.1",
    show_default=True,
)
@option(
    "--token",
    "TOKEN",
    "The secret in the address. With the same token and port, open pages reconnect after a "
    "restart. Set it as OSTRAKA_BOARD_TOKEN, since other users can see the options of a command.  "
    "[default: a new one]",
    envvar="OSTRAKA_BOARD_TOKEN",
    callback=_token,
)
def board(directory: str, port: int, host: str, token: str | None) -> None:
    """Show the run in DIRECTORY in a browser while it goes on.

    It prints an address to open. The page shows steps as they are committed, deleted, damaged and
    pinned. Click a step to see its checkpoint, and to verify every byte of it. Nothing is written,
    and no step is kept for it. DIRECTORY need not exist yet. Ctrl-C ends it.

    The board listens on this machine only, and every request needs the token in the address. From
    another machine, forward the port: ssh -L 8000:127.0.0.1:8000 HOST.

    \b
    Examples:
      ostraka board runs/a
      ostraka board s3://bucket/runs/a --port 8000
    """
    from ostraka.report.board import Board, is_loopback

    store = await_root(directory).store
    served = Board(directory, host=host, port=port, token=token)
    echo(f"{printable(served.location)}")
    echo(served.url)
    if not store.exists():
        echo(f"waiting for {printable(served.location)}, where nothing is yet", err=True)
    if not is_loopback(host):
        echo(
            f"everyone who can reach {printable(host)} and has this address can read the run, and "
            "what it sends is not encrypted",
            err=True,
        )
    try:
        served.serve()
    except KeyboardInterrupt:
        echo("ended", err=True)
