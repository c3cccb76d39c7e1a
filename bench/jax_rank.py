"""One of four JAX processes with two devices each: Ostraka, Orbax and the bare floor."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax

from bench.bare import Bare
from bench.contenders import BEST_PROCESSES, Contender, hush, make_contenders
from bench.data import Size
from bench.machine import free_memory
from bench.ranks import RANKS, Command, serve
from bench.rounds import say
from bench.state import make_tree, template


class JaxRank:
    """Holds this process's part of the state, and does what it is told."""

    def __init__(self, size: Size, rank: int) -> None:
        self._rank = rank
        found = make_contenders(BEST_PROCESSES, say=say)
        self._contenders: dict[str, Contender] = {c.name: c for c in found}
        self._tree = make_tree(size)
        self._like = template(self._tree)
        self._restored: Any = None

    def prepare(self, _: Command) -> None:
        """Come to rest before a measurement."""
        self._restored = None
        free_memory()

    def learn(self, command: Command) -> None:
        """Take this rank's share of a checkpoint's files as what the bare floor writes."""
        path = Path(command["path"])
        self._contenders["bare"] = Bare.learn(path, slice(self._rank, None, RANKS))

    def save(self, command: Command) -> None:
        """Save this process's part."""
        self._contenders[command["name"]].save(Path(command["path"]), self._tree)

    def restore(self, command: Command) -> None:
        """Restore this process's part, and keep it for `check`."""
        contender = self._contenders[command["name"]]
        self._restored = contender.restore(Path(command["path"]), self._like)

    def check(self, command: Command) -> None:
        """Raise unless the last restore brought back the state."""
        self._contenders[command["name"]].check(self._restored, self._tree)
        self._restored = None


def main() -> None:
    """Join the others, then serve."""
    setup = json.loads(sys.argv[1])
    hush()
    jax.distributed.initialize(f"127.0.0.1:{setup['port']}", RANKS, setup["rank"])
    rank = JaxRank(Size(**setup["size"]), setup["rank"])
    serve(
        {
            "hello": lambda _: None,
            "prepare": rank.prepare,
            "learn": rank.learn,
            "save": rank.save,
            "restore": rank.restore,
            "check": rank.check,
        },
        timed={"save", "restore"},
    )
    sys.stderr.flush()
    # Nothing is left to wait for, and a shutdown barrier would only delay the next case.
    os._exit(0)


if __name__ == "__main__":
    main()
