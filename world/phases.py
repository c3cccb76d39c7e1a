"""What each process of a group does, case by case. A failing case does not keep the others.

`reference` trains without a checkpoint. `save` trains half as far, saves in three ways and is
killed. `like`, `abstract`, `into`, `none` go on from what it left. `mesh_save` and `mesh` are the
same on two meshes.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

import ostraka
from ostraka import sharding
from ostraka.errors import InvalidTree
from world.case import Case, Program
from world.facts import Facts, adopt, as_in, compare, facts_of, once

SAVED_AT = 3
LAST = 6
PHASES = ("reference", "save", "like", "abstract", "into", "none", "mesh_save", "mesh")
KILLED = ("save", "mesh_save")
MESH_DEVICES = 8


def run_phase(phase: str, cases: list[Case], root: Path) -> None:
    """Do a phase for all cases; a file for each says how it went."""
    for number, case in cases_of(phase, cases):
        folder = root / f"{number:03}"
        folder.mkdir(exist_ok=True)
        if phase != "reference" and not (folder / "end.facts").exists():
            continue  # it does not even train
        try:
            problems = _WORK[phase](case, folder)
        except Exception as error:
            (folder / f"{phase}.traceback").write_text(traceback.format_exc(), "utf-8")
            problems = [f"{type(error).__name__}: {error}"]
        (folder / f"{phase}.json").write_text(json.dumps(problems), "utf-8")
    if phase in KILLED:
        os.kill(os.getpid(), signal.SIGKILL)


def cases_of(phase: str, cases: list[Case]) -> list[tuple[int, Case]]:
    mode = "mesh" if phase == "mesh_save" else phase
    return [(number, case) for number, case in enumerate(cases) if mode not in case.left_out]


def _reference(case: Case, folder: Path) -> list[str]:
    program = case.build()
    state, _ = _train(program, program.make(), 0, SAVED_AT)
    _write(folder / "saved", {"facts": facts_of(state)})
    state, losses = _train(program, state, SAVED_AT, LAST)
    _write(folder / "end", {"facts": facts_of(state), "losses": losses})
    return ["the case does not train: all losses are equal"] if len(set(losses)) == 1 else []


def _save(case: Case, folder: Path) -> list[str]:
    program = case.build()
    state, _ = _train(program, program.make(), 0, SAVED_AT)
    problems = compare(_saved(folder), facts_of(state), "the case is not repeatable")
    ostraka.save(folder / "blocking", state)
    manager = ostraka.Manager(folder / "manager")
    manager.save(SAVED_AT, state)
    handle = ostraka.save_async(folder / "async", state)
    # What was saved must not notice that training goes on.
    _train(program, state, SAVED_AT, SAVED_AT + 1)
    handle.wait()
    manager.wait()
    return problems


def _like(case: Case, folder: Path) -> list[str]:
    program = case.build()
    problems: list[str] = []
    for name in ("async", "blocking"):
        if not ostraka.verify(folder / name).ok:
            problems.append(f"verify finds {name} damaged")
        template = program.make()
        expected = as_in(facts_of(template), _saved(folder))
        state = ostraka.restore(folder / name, like=template)
        problems += compare(expected, facts_of(state), name)
        problems += _compare_structure(template, state)
    return problems + _go_on(program, state, folder)


def _abstract(case: Case, folder: Path) -> list[str]:
    program = case.build()
    template = program.abstract() if program.abstract else nnx.eval_shape(program.make)
    state = ostraka.restore(folder / "async", like=template)
    return compare(_saved(folder), facts_of(state), "async") + _go_on(program, state, folder)


def _into(case: Case, folder: Path) -> list[str]:
    program = case.build()
    target = program.make()
    before = dict(_nnx_objects(target))
    expected = as_in(facts_of(target), _saved(folder))
    with ostraka.Manager(folder / "manager") as manager:
        assert manager.latest() == SAVED_AT
        try:
            state = manager.restore(into=target)
        except InvalidTree as error:  # of a class that can't change, such as a TrainState
            if "write state = ostraka.restore(path, like=state)" not in str(error):
                raise
            state = manager.restore(like=target)
    problems = compare(expected, facts_of(state), "manager")
    problems += [
        f"{path or 'the tree'} was not changed in place"
        for path, thing in _nnx_objects(state)
        if before[path] is not thing
    ]
    return problems + _go_on(program, state, folder)


def _none(case: Case, folder: Path) -> list[str]:
    # Nothing is made first: what comes back must not lean on objects that are there.
    program = case.build()
    restored = ostraka.restore(folder / "blocking")
    fresh = program.make()
    restored = _with_iterators(fresh, restored)
    problems = _compare_unguided(_saved(folder), restored, fresh, "blocking")
    if _nnx_objects(fresh):
        restored = _adopt_states(fresh, ostraka.restore(folder / "blocking", as_state=True))
    elif case.as_dicts:
        if not _compare_structure(fresh, restored):
            problems.append("it comes back whole: `as_dicts` is wrong")
        restored = adopt(fresh, restored)
    else:
        problems += _compare_structure(fresh, restored)
    return problems + _go_on(program, restored, folder)


def _mesh_save(case: Case, folder: Path) -> list[str]:
    program = case.build()
    state = _on_mesh(program.make(), _mesh(MESH_DEVICES))
    state, _ = _train(program, state, 0, SAVED_AT)
    _write(folder / "mesh-saved", {"facts": facts_of(state)})
    ostraka.save(folder / "mesh-checkpoint", state)
    _, losses = _train(program, state, SAVED_AT, LAST)
    _write(folder / "mesh-end", {"losses": losses})
    return []


def _mesh_restore(case: Case, folder: Path) -> list[str]:
    program = case.build()
    path = folder / "mesh-checkpoint"
    saved = _read(folder / "mesh-saved")["facts"]
    mesh = _mesh(MESH_DEVICES // 2)
    template = _on_mesh(program.make(), mesh)
    problems: list[str] = []
    if "none" not in case.left_out:
        unguided = _with_iterators(program.make(), ostraka.restore(path, mesh=mesh))
        problems += _compare_unguided(saved, unguided, template, "no template")
    expected = as_in(facts_of(template), saved)
    state = ostraka.restore(path, like=template)
    problems += compare(expected, facts_of(state), "like")
    problems += _compare_shardings(template, state)
    _, losses = _train(program, state, SAVED_AT, LAST)
    reference = _read(folder / "mesh-end")["losses"]
    if not np.allclose(losses, reference, rtol=case.mesh_tolerance, atol=case.mesh_tolerance):
        problems.append(f"losses: {reference}, now {losses}")
    return problems


_WORK: dict[str, Callable[[Case, Path], list[str]]] = {
    "reference": _reference,
    "save": _save,
    "like": _like,
    "abstract": _abstract,
    "into": _into,
    "none": _none,
    "mesh_save": _mesh_save,
    "mesh": _mesh_restore,
}


def _train(program: Program, state: Any, start: int, stop: int) -> tuple[Any, list[float]]:
    losses: list[float] = []
    for i in range(start, stop):
        state, loss = program.step(state, i)
        losses.append(float(loss))
    return state, losses


def _go_on(program: Program, state: Any, folder: Path) -> list[str]:
    """Train to the end; it must be that of the run that nothing interrupted."""
    reference = _read(folder / "end")
    state, losses = _train(program, state, SAVED_AT, LAST)
    problems = compare(reference["facts"], facts_of(state), "at the end")
    if losses != reference["losses"]:
        problems.append(f"losses: {reference['losses']}, now {losses}")
    return problems


def _compare_structure(expected: Any, found: Any) -> list[str]:
    was, now = jax.tree.structure(expected), jax.tree.structure(found)
    return [] if was == now else [f"structure: {str(was)[:300]}, now {str(now)[:300]}"]


def _compare_shardings(expected: Any, found: Any) -> list[str]:
    different = [
        f"sharding {was.sharding}, now {now.sharding}"
        for was, now in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)
        if isinstance(was, jax.Array) and not was.sharding.is_equivalent_to(now.sharding, was.ndim)
    ]
    return different[:1]


def _compare_unguided(saved: Facts, restored: Any, fresh: Any, where: str) -> list[str]:
    found = facts_of(restored)
    if not _nnx_objects(fresh):
        return compare(saved, found, where)
    # Modules come back as dicts, as `nnx.state` has them, with no objects that could be shared.
    return compare(once(saved, found), found, where, ignore=("shared",))


def _is_nnx(value: Any) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _nnx_objects(tree: Any) -> list[tuple[str, Any]]:
    """The outermost ones, by path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_nnx)
    return [(jax.tree_util.keystr(keys), value) for keys, value in flat if _is_nnx(value)]


def _with_iterators(fresh: Any, restored: Any) -> Any:
    """Without a template the state of a data iterator comes back; a new iterator takes it."""
    if not isinstance(fresh, dict):
        return restored
    for name, value in fresh.items():
        if hasattr(value, "set_state"):
            value.set_state(restored[name])
            restored[name] = value
    return restored


def _adopt_states(fresh: Any, restored: Any) -> Any:
    """The new modules with the states that came back, as Flax's guides do it."""
    if _is_nnx(fresh):
        nnx.update(fresh, restored)
        return fresh
    if hasattr(fresh, "set_state"):
        return fresh  # `_with_iterators` has put it where it was
    if isinstance(fresh, dict) and _nnx_objects(fresh):
        return {name: _adopt_states(value, restored[name]) for name, value in fresh.items()}
    return restored


def _mesh(devices: int) -> Mesh:
    shape = (devices,) if devices == MESH_DEVICES else (devices // 2, 2)
    names = ("data", "model")[: len(shape)]
    # Most of these programs were written for automatic sharding, as most programs are.
    return jax.make_mesh(
        shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=jax.devices()[:devices]
    )


def _on_mesh(state: Any, mesh: Mesh) -> Any:
    return sharding.place(state, mesh, sharding.fsdp("data", min_size=16))


def _write(path: Path, value: Any) -> None:
    path.with_suffix(".facts").write_text(json.dumps(value), "utf-8")


def _saved(folder: Path) -> Facts:
    return _read(folder / "saved")["facts"]


def _read(path: Path) -> Any:
    return json.loads(path.with_suffix(".facts").read_text("utf-8"))
