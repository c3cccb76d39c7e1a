"""Shell completion; names from checkpoints are quoted, so that a shell never runs them.

The name of a leaf is untrusted. bash inserts a completion as it is, so it is quoted here; zsh and
fish quote completions themselves. Names that can't be typed, such as those with line breaks, are
left out.
"""

from __future__ import annotations

import os
import re
from typing import Any

from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

_PLAIN = re.compile(r"[A-Za-z0-9_./,:=@%+-]|[^\x00-\x7f]")
"""Characters that mean themselves to bash, wherever they stand."""


def complete_variable(name: str) -> str:
    """The environment variable by which a shell asks for completions, as click names it."""
    return f"_{name}_COMPLETE".replace("-", "_").replace(".", "_").upper()


def quote_for_bash(text: str, opened: str = "") -> str:
    """Text quoted so that bash reads it unchanged, after a quote that was `opened`, if any.

    The text must not have that quote in it.
    """
    if opened == "'":
        return text
    if opened == '"':
        return re.sub(r"[\\$`!]", r"\\\g<0>", text)
    return "".join(c if _PLAIN.fullmatch(c) else f"\\{c}" for c in text)


class _Typed(ShellComplete):
    """Leaves out completions that can't be typed."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        offers = super().get_completions(args, incomplete)
        return [offer for offer in offers if str(offer.value).isprintable()]


class _Bash(_Typed, BashComplete):
    # Unlike click's, it takes each completion as one word, without globbing and escapes.
    source_template = """\
%(complete_func)s() {
    local IFS=$'\\n' response type value
    response=$(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD \
%(complete_var)s=bash_complete "$1")
    while IFS=, read -r type value; do
        case $type in
            dir) COMPREPLY=(); compopt -o dirnames ;;
            file) COMPREPLY=(); compopt -o default ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done <<< "$response"
    return 0
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        offers = super().get_completions(args, incomplete)
        opened = self._opened()
        # bash can't close a quote that is also inside the text.
        return [offer for offer in offers if not opened or opened not in str(offer.value)]

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.type},{quote_for_bash(str(item.value), self._opened())}"

    def _opened(self) -> str:
        """The quote that the word to complete begins with, or nothing."""
        words = os.environ["COMP_WORDS"].split("\n")
        number = int(os.environ["COMP_CWORD"])
        first = words[number][:1] if number < len(words) else ""
        return first if first in ("'", '"') else ""


class _Zsh(_Typed, ZshComplete):
    pass


class _Fish(_Typed, FishComplete):
    # Unlike click's, it does not cut a completion at its first comma.
    source_template = FishComplete.source_template.replace(
        'string split ","', 'string split --max 1 ","'
    )


_SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


def script_for(shell: str, command: Any, name: str) -> str:
    """The script that makes a shell complete a command."""
    return _SHELLS[shell](command, {}, name, complete_variable(name)).source()


def answer_shells() -> None:
    """Register these classes with click."""
    for kind in _SHELLS.values():
        add_completion_class(kind)
