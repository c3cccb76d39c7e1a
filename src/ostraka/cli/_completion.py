"""`ostraka completion`: completion of commands, options, leaves and steps in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that makes SHELL complete ostraka's commands.

    It completes commands, options and directories, the leaves of a checkpoint and the steps of a
    directory. Put the line of your shell into its start-up file.

    \b
    Examples:
      eval "$(ostraka completion bash)"                                    # ~/.bashrc
      eval "$(ostraka completion zsh)"                                     # ~/.zshrc
      ostraka completion fish > ~/.config/fish/completions/ostraka.fish
    """
    root = context.find_root()
    name = root.info_name or "ostraka"
    variable = f"_{name}_COMPLETE".replace("-", "_").replace(".", "_").upper()  # as click names it
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(root.command, {}, name, variable).source())
