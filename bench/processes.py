"""Four processes with two devices each: save and restore, against Orbax and PyTorch DCP."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.data import Size, few_large
from bench.machine import remove
from bench.ranks import Ranks, free_port
from bench.rounds import Options, Row, interleave

# One thread for each rank's tensor copies, as torchrun sets it: with more, the ranks' threads wait
# for each other in busy loops and DCP's times grow tenfold.
TORCH_ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
JAX_ENV = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}


@dataclass(frozen=True, slots=True)
class Team:
    """A contender whose work is done by a group of ranks."""

    name: str
    ranks: Ranks

    def save(self, path: Path) -> float:
        """Seconds of a save."""
        return self._time("save", path)

    def restore(self, path: Path) -> float:
        """Seconds of a restore."""
        return self._time("restore", path)

    def check(self) -> None:
        """Raise unless the last restore brought back the state."""
        self.ranks.ask({"op": "check", "name": self.name})

    def _time(self, op: str, path: Path) -> float:
        self.ranks.ask({"op": "prepare"})
        os.sync()
        return self.ranks.time({"op": op, "name": self.name, "path": str(path)})


def four_processes(options: Options) -> list[Row]:
    """One row for save and one for restore."""
    size = few_large(options.scale)
    amount = f"{size.state_bytes / 2**30:.3g} GiB, 4 processes × 2 devices"
    save = Row("processes_save", f"save {amount}", size.state_bytes)
    restore = Row("processes_restore", f"restore {amount}, warm", size.state_bytes)
    groups: list[Ranks] = []
    try:
        teams = _gather(size, options, save, groups)
        _measure(teams, options, save, restore)
        restore.note(f"{restore.id}: DCP loads into tensors that exist; the others fill new memory")
    finally:
        for group in groups:
            group.close()
    return [save, restore]


def _gather(size: Size, options: Options, row: Row, groups: list[Ranks]) -> list[Team]:
    """Start the groups; who can't be there is left out aloud."""
    teams: list[Team] = []
    jax_ranks = _start(sys.executable, "bench.jax_rank", JAX_ENV, size, options, row, groups)
    if jax_ranks:
        names = ("ostraka", "orbax", "orbax_best")
        teams = _able([Team(name, jax_ranks) for name in names], options, row)
        if teams and teams[0].name == "ostraka":
            teams.append(_learn_bare(teams[0], options))
    if options.torch_python is None:
        row.note("PYTORCH DCP IS SKIPPED: no Python with torch was given or found")
    else:
        torch_ranks = _start(
            options.torch_python, "bench.torch_rank", TORCH_ENV, size, options, row, groups
        )
        if torch_ranks:
            teams += _able([Team(name, torch_ranks) for name in ("dcp", "dcp_best")], options, row)
    return teams


def _start(
    python: str,
    module: str,
    env: dict[str, str],
    size: Size,
    options: Options,
    row: Row,
    groups: list[Ranks],
) -> Ranks | None:
    setup = {"size": asdict(size), "port": free_port(), "scratch": str(options.scratch)}
    try:
        groups.append(Ranks(python, module, env, setup))
    except (OSError, RuntimeError) as error:
        row.note(f"{module.upper()} IS SKIPPED: {error}")
        return None
    return groups[-1]


def _able(teams: list[Team], options: Options, row: Row) -> list[Team]:
    """Those that bring back what they saved, in a turn that does not count."""
    able: list[Team] = []
    for team in teams:
        path = options.scratch / "warm_up"
        try:
            team.save(path)
            team.restore(path)
            team.check()
            able.append(team)
        except (OSError, RuntimeError) as error:
            row.note(f"{team.name} is left out: {error}")
        remove(path)
    return able


def _learn_bare(ostraka: Team, options: Options) -> Team:
    path = options.scratch / "warm_up"
    ostraka.save(path)
    ostraka.ranks.ask({"op": "learn", "path": str(path)})
    remove(path)
    return Team("bare", ostraka.ranks)


def _measure(teams: list[Team], options: Options, save: Row, restore: Row) -> None:
    """A round is a save and a restore of every team; the checkpoint is warm by then."""

    def turn(team: Team) -> float:
        path = options.scratch / team.name
        remove(path)
        try:
            save_s = team.save(path)
            team.restore(path)
            restore_s = team.restore(path)
            team.check()
        finally:
            remove(path)
        restore.values.setdefault(team.name, []).append(restore_s)
        return save_s

    interleave(save, teams, options.rounds, turn)
    for name in restore.values.keys() - save.values.keys():
        del restore.values[name]
