"""`ostraka completion`: completion of commands, options, leaves and steps in a shell."""

from __future__ import annotations

import click

from ostraka.cli._shells import script_for


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
    click.echo(script_for(shell, root.command, root.info_name or "ostraka"))
