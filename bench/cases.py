"""The cases of one process with eight devices: save, restore, restore onto another mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from jax.sharding import NamedSharding

from bench.bare import Bare
from bench.contenders import BEST_LARGE, BEST_MANY, Contender, Setting, make_contenders
from bench.data import Size, few_large, many_small
from bench.machine import drop_caches, remove
from bench.rounds import Options, Row, interleave, timed
from bench.state import (
    Template,
    Tree,
    grid_sharding,
    make_tree,
    reshard,
    template,
    transposed_sharding,
)

WARM_UP = Size(leaves=2, rows=64, columns=64)


def save_large(options: Options) -> list[Row]:
    """Save 1 GiB in 64 leaves."""
    size = few_large(options.scale)
    row = Row("save_large", f"save {_words(size)}, 8 devices", size.state_bytes)
    return _measure_saves(row, size, BEST_LARGE, options, options.rounds)


def save_many(options: Options) -> list[Row]:
    """Save 1,000 small leaves."""
    size = many_small(options.scale)
    row = Row("save_many", f"save {_words(size)}, 8 devices", size.state_bytes)
    return _measure_saves(row, size, BEST_MANY, options, options.few_rounds)


def restore_warm(options: Options) -> list[Row]:
    """Restore 1 GiB onto the same mesh, from the page cache."""
    size = few_large(options.scale)
    row = Row("restore_warm", f"restore {_words(size)}, same mesh, warm", size.state_bytes)
    return _measure_restores([(row, None)], size, BEST_LARGE, options, options.rounds)


def restore_cold(options: Options) -> list[Row]:
    """Restore 1 GiB onto the same mesh, from the disk."""
    size = few_large(options.scale)
    row = Row("restore_cold", f"restore {_words(size)}, same mesh, cold", size.state_bytes)
    means: set[str] = set()

    def make_cold() -> None:
        means.add(drop_caches(options.scratch))

    rows = _measure_restores(
        [(row, None)], size, BEST_LARGE, options, options.rounds, before=make_cold
    )
    row.note(f"restore_cold: page cache emptied by {' and '.join(sorted(means))}")
    return rows


def restore_many(options: Options) -> list[Row]:
    """Restore 1,000 small leaves onto the same mesh."""
    size = many_small(options.scale)
    row = Row("restore_many", f"restore {_words(size)}, 8 devices", size.state_bytes)
    return _measure_restores([(row, None)], size, BEST_MANY, options, options.few_rounds)


def restore_mesh(options: Options) -> list[Row]:
    """Restore 1 GiB, saved by rows on 8 devices, onto two other meshes."""
    size = few_large(options.scale)
    title = f"restore {_words(size)}, saved on 8, onto"
    grid = Row("restore_grid", f"{title} 4×2", size.state_bytes)
    transposed = Row("restore_transposed", f"{title} 2×4 transposed", size.state_bytes)
    targets = [(grid, grid_sharding), (transposed, transposed_sharding)]
    return _measure_restores(targets, size, BEST_LARGE, options, options.rounds)


def _words(size: Size) -> str:
    total = size.state_bytes
    amount = f"{total / 2**30:.3g} GiB" if total >= 2**29 else f"{total / 2**20:.3g} MiB"
    if size.columns == 256:
        return f"{size.leaves:,} leaves of {size.leaf_bytes // 2**10} KiB"
    return f"{amount} in {size.leaves} leaves"


def _prepare(row: Row, size: Size, best: Setting, options: Options) -> tuple[Tree, list[Contender]]:
    """The state, and the contenders with their imports and first calls behind them."""
    small, path = make_tree(WARM_UP), options.scratch / "warm_up"

    def warm_up(contender: Contender) -> None:
        remove(path)
        contender.save(path, small)
        contender.check(contender.restore(path, template(small)), small)

    contenders = _able(row, make_contenders(best, say=row.note), warm_up)
    tree = make_tree(size)
    if contenders and contenders[0].name == "ostraka":
        remove(path)
        contenders[0].save(path, tree)
        contenders.append(Bare.learn(path))
    remove(path)
    return tree, contenders


def _able(
    row: Row, contenders: list[Contender], work: Callable[[Contender], None]
) -> list[Contender]:
    """Those for whom `work` succeeds; the others leave aloud."""
    able: list[Contender] = []
    for contender in contenders:
        try:
            work(contender)
            able.append(contender)
        except Exception as error:
            row.note(f"{row.id}: {contender.name} is left out: {type(error).__name__}: {error}")
    return able


def _measure_saves(row: Row, size: Size, best: Setting, options: Options, rounds: int) -> list[Row]:
    row.notes.append(f"{row.id}: Orbax's best setting is {best.words}")
    tree, contenders = _prepare(row, size, best, options)
    like = template(tree)

    def turn(contender: Contender) -> float:
        path = options.scratch / contender.name
        remove(path)
        try:
            elapsed_s, _ = timed(lambda: contender.save(path, tree))
            contender.check(contender.restore(path, like), tree)
        finally:
            remove(path)
        return elapsed_s

    interleave(row, contenders, rounds, turn)
    return [row]


def _measure_restores(
    targets: Sequence[tuple[Row, Callable[[], NamedSharding] | None]],
    size: Size,
    best: Setting,
    options: Options,
    rounds: int,
    before: Callable[[], None] | None = None,
) -> list[Row]:
    first = targets[0][0]
    tree, contenders = _prepare(first, size, best, options)

    def save(contender: Contender) -> None:
        remove(options.scratch / contender.name)
        contender.save(options.scratch / contender.name, tree)

    contenders = _able(first, contenders, save)
    for row, sharding in targets:
        row.notes.append(f"{row.id}: Orbax's best setting is {best.words}")
        want = reshard(tree, sharding()) if sharding else tree
        like = template(want)
        _restore_in_turns(row, contenders, want, like, options.scratch, rounds, before)
    for contender in contenders:
        remove(options.scratch / contender.name)
    return [row for row, _ in targets]


def _restore_in_turns(
    row: Row,
    contenders: list[Contender],
    want: Tree,
    like: Template,
    scratch: Path,
    rounds: int,
    before: Callable[[], None] | None,
) -> None:
    def turn(contender: Contender) -> float:
        if before:
            before()
        elapsed_s, restored = timed(lambda: contender.restore(scratch / contender.name, like))
        contender.check(restored, want)
        return elapsed_s

    if before is None:
        # A round that does not count brings all files into the page cache, however written.
        interleave(Row(row.id, row.title, row.state_bytes), contenders, 1, turn)
    interleave(row, contenders, rounds, turn)
