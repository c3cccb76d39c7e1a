"""Checkpoints that a stranger has forged, with digests that fit: refused in a sentence of ours.

What the local file system adds (links, pipes, devices) is in other files.
"""

import dataclasses
import enum
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

import fuzz
import ostraka
from cli_runs import run
from fuzz import MOST_MEMORY, MOST_SECONDS, MemoryMeter, call, put_files, resealed, seal, watchdog
from mutations import ESCAPE
from ostraka.errors import Damaged, OstrakaError, PartialRestore
from ostraka.layout import shard_file
from ostraka.storage import MemoryStore
from places import flip


def make_tree() -> Any:
    """One array in one file."""
    return {"w": jax.device_put(np.arange(16, dtype=np.float32), jax.devices()[0])}


def forge(name: str, change: Callable[[Any], Any]) -> str:
    """The place of a checkpoint whose `_METADATA` was changed, digest included.

    `change` changes the document, or returns fields for it.
    """
    seed = fuzz.saved(name, make_tree())
    document = json.loads(json.dumps(seed.document))
    document |= change(document) or {}
    text = shard_file.dumps(document).encode()
    put_files(f"forged/{name}/step_1", {**seed.files, "_METADATA": seal(text)})
    return f"memory://forged/{name}/step_1"


def read_everything(place: str, held_bytes: int = 1 << 16) -> list[OstrakaError]:
    """All that reads a checkpoint; returns the errors. Anything else fails, as does a hoarder."""
    found: list[OstrakaError] = []
    meter = MemoryMeter()
    for work in (
        fuzz.open_all,
        fuzz.restore_as_saved,
        fuzz.restore_as_state,
        fuzz.verify,
        ostraka.verify,
        lambda place: [call(*a) for a in (("show", place), ("verify", place), ("plan", place))],
        lambda place: call("diff", place, place),
        lambda place: call("ls", place.rpartition("/")[0]),
    ):
        try:
            with watchdog(MOST_SECONDS):
                work(place)
        except OstrakaError as error:
            found.append(error)
        assert meter.rise() < MOST_MEMORY + 10 * held_bytes, work
    # A bad step does not hide the others.
    assert set(ostraka.Manager(place.rpartition("/")[0], read_only=True).steps()) <= {1}
    return found


# Memory and time


def leaf(**fields: Any) -> Callable[[Any], Any]:
    return lambda body: body["leaves"][0].update(fields)


def cells(count: int, leaves: int) -> Callable[[Any], Any]:
    """Leaves of so many boxes each, as many as there are files."""
    names = [f"w{n}" for n in range(leaves)]
    header_bytes = 4096 * max(1, leaves // 12)
    files = {"device": 0, "header_bytes": header_bytes, "size": header_bytes + leaves}
    described = {"shape": [count], "dtype": "uint8", "layout": 0}
    return lambda body: {
        "leaves": [body["leaves"][0] | described | {"path": name} for name in names],
        "tree": {"dict": names, "items": list(range(leaves))},
        "layouts": [{"grid": [count], "owners": [[0, 0, count]]}],
        "files": {name: [[value, 0, count]] for name, value in files.items()}
        | {"part": [[0, 1, count]]},
    }


def leaves_of_variables(body: Any) -> Any:
    item = {"list": None, "items": [None] * 2000}
    first = {"variable": ["flax.nnx", "Param"], "about": {}, "items": [item]}
    again = [{"same_as": "0"}] * 2000
    leaf(path="2001/w")(body)
    return {"tree": {"list": None, "items": [first, *again, {"dict": ["w"], "items": [0]}]}}


def long_paths(body: Any) -> Any:
    inner = {"list": None, "items": [None] * 50_000}
    return {"tree": {"dict": ["x" * 20_000, "w"], "items": [inner, 0]}}


def long_leaf(body: Any) -> None:
    """A file that is not as long as it should be: no memory is taken for what it should hold."""
    leaf(shape=[1 << 34])(body)
    body["files"]["size"] = [[4096 + (1 << 36), 0, 1]]


def on_axis(size: int, spec: list[str]) -> Callable[[Any], Any]:
    """The leaf over an axis `x`."""
    devices = [[0, 0, 1]] if size else []

    def change(body: Any) -> Any:
        leaf(mesh=0, spec=[spec])(body)
        return {"meshes": [{"axes": ["x"], "shape": [size], "devices": devices, "types": []}]}

    return change


LARGE: dict[str, Callable[[Any], Any]] = {
    "layouts": lambda body: {
        "process_of": [[0, 0, 1]],
        "layouts": body["layouts"] + [{"grid": [1 << 24], "owners": [[0, 0, 1 << 24]]}] * 10,
    },
    "cells": cells(1 << 20, 1),
    # Not too long for `_METADATA` itself: its boxes are more than the files can hold.
    "cells of leaves": cells(1 << 13, 200),
    "devices": lambda body: {"process_of": [[0, 1, 1 << 20]]},
    "processes": lambda body: {"process_of": [[(1 << 24) - 1, 0, 1]]},
    "tebibyte": leaf(shape=[1 << 38]),
    "compressed": lambda body: leaf(shape=[1 << 38])(body) or {"version": 2},
    "variables": leaves_of_variables,
    "paths": long_paths,
    "leaf": long_leaf,
    "spec": on_axis(1, ["x"] * 20_000),
}


@pytest.mark.parametrize("kind", LARGE)
def test_few_bytes_do_not_take_much_memory_or_time(kind: str):
    place = forge(f"large-{kind}", LARGE[kind])
    held = sum(file.size for file in MemoryStore(place.removeprefix("memory://")).files(""))
    assert read_everything(place, held), "nothing was refused"


def test_what_a_real_checkpoint_of_many_devices_needs_is_allowed():
    """Lists as long as 65,536 devices make them, of a few hundred layouts."""
    count = 1 << 16

    mesh = {"axes": ["x", "y"], "shape": [count // 8, 8], "devices": [[0, 1, count]], "types": []}
    place = forge(
        "large",
        lambda body: {
            "process_of": [[process, 0, 4] for process in range(count // 4)],
            "meshes": [mesh] * 4,
            "layouts": body["layouts"] + [{"grid": [count], "owners": [[0, 1, count]]}] * 40,
        },
    )
    assert ostraka.open(place)["w"].shape == (16,)


@pytest.mark.parametrize("is_header", [True, False])
def test_what_is_long_in_a_sparse_file_is_not_read(tmp_path: Path, is_header: bool):
    path, size = tmp_path / "checkpoint", 20 << 30
    ostraka.save(path, make_tree())
    next(path.glob("shards-*/metadata.json")).unlink()  # It would not fit what is changed.
    (shard,) = path.glob("shards-*/*.safetensors")
    files = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    body = json.loads(files["_METADATA"])
    del body["digest"]
    os.truncate(shard, size)
    body["files"]["size"] = [[size, 0, 1]]
    if is_header:
        body["files"]["header_bytes"] = [[size - 64, 0, 1]]
    else:
        long = {"path": "z", "dtype": "uint8", "shape": [size - 4096 - 64]}
        body["leaves"].append(body["leaves"][0] | long)
        body["tree"] = {"dict": ["w", "z"], "items": [0, 1]}
    seed = fuzz.Seed(files, body)
    (name,) = seed.named(".json")
    index = json.loads(files[name])
    lengths = [size - 64, 64] if is_header else [4096, size - 4096]
    index["files"][shard.name] = {
        "size": size,
        "blocks": [[length, 0, 1] for length in lengths],
        "digests": "0" * 32,
    }
    changed = resealed(seed, {name: shard_file.dumps(index).encode()}, body)
    for file in (name, "_METADATA"):
        (path / file).write_bytes(changed[file])
    if is_header:
        errors = read_everything(str(path))
        assert errors
        assert all("header" in str(error) for error in errors)
    else:
        said = r"process_00000\.json: it has a block of 21,474,832,384 bytes"
        with pytest.raises(Damaged, match=said):
            ostraka.restore(path, only="w")


# Exceptions of others


def in_tree(node: Any) -> Callable[[Any], Any]:
    return lambda body: {"tree": {"dict": ["w", "x"], "items": [0, node]}}


def variable(**fields: Any) -> Callable[[Any], Any]:
    node = {"variable": ["flax.nnx", "Param"], "about": {}, "items": [{"int": 1}]}
    return in_tree(node | fields)


def of_rank(rank: int) -> Callable[[Any], Any]:
    def change(body: Any) -> None:
        leaf(shape=[16] + [1] * (rank - 1))(body)
        body["layouts"][0]["grid"] = [1] * rank

    return change


def deep(levels: int) -> Any:
    return {"tuple": [deep(levels - 1)]} if levels else {"int": 1}


TWICE = {"keys": ["\ufb01", "fi"], "items": [{"int": 1}, {"int": 2}]}
ODD: dict[str, Callable[[Any], Any]] = {
    "float": in_tree({"float": "0x1p99999"}),
    "float64": in_tree({"float64": "00"}),
    "namedtuple": in_tree(TWICE | {"namedtuple": ["m", "T"]}),
    "keyword": in_tree(TWICE | {"namedtuple": ["m", "class"]}),
    "deep": in_tree({"dict": [deep(400)], "items": [None]}),
    "axis": on_axis(0, ["x"]),
    "processes": leaf(per_process=True, shape=[0]),
    "processes2": leaf(per_process=True, shape=[16], dtype="uint32", kind="key", prng="rbg"),
    "rank": of_rank(100),
    "generator": leaf(kind="key", dtype="uint32", prng="none such"),
    "words": leaf(kind="key", dtype="uint32", prng="threefry2x32"),
    "about": variable(about=[]),
    "about2": variable(about={"x": {"float": "0x1p99999"}}),
    "about3": variable(about={"x": [[{}]]}),
    "about4": variable(about={"hijax": {"bool": True}, "on_get_value": {"str": "x"}}),
    "variable": variable(variable=[["a"], {}]),
    "variable2": variable(variable=["builtins", "dict"]),
    "timeline": lambda body: body["writer"].update(
        timeline={"write_s": 10**400, "bytes": 10**400, "plan_s": 1e308}
    ),
    "time": lambda body: body["writer"].update(time=[[]], ostraka={}, jax=None, hosts=[1]),
    "version": lambda body: {"version": True},
    "integer": in_tree({"int": hex(1 << 40_000)}),
    "files": lambda body: body["files"].update(part=[[1 << 70, 0, 1]]),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_raised_exceptions_of_others(kind: str):
    read_everything(forge(f"odd-{kind}", ODD[kind]))


@pytest.mark.parametrize("index", [b"null", b"[]", b"[" * 5000, b'{"files":null}', b"{", b"\xff"])
def test_an_index_that_is_none(index):
    seed = fuzz.saved("index", make_tree())
    (name,) = seed.named(".json")
    put_files("forged/index/step_1", resealed(seed, {name: index}))
    found = read_everything("memory://forged/index/step_1")
    assert found
    assert all("process_00000.json" in str(error) for error in found)


@pytest.mark.parametrize("header", [b"null", b"[" * 2000, b"{}", b"\xff" * 9])
def test_a_header_that_is_none(header):
    """A restore does not need it: what is in a file follows from `_METADATA`. Other tools do."""
    seed = fuzz.saved("header", make_tree())
    (name,) = seed.named(".safetensors")
    data = seed.files[name]
    put_files(
        "forged/header/step_1", resealed(seed, {name: data[:8] + header.ljust(4088) + data[4096:]})
    )
    (found,) = read_everything("memory://forged/header/step_1")
    assert "shard_00000.safetensors" in str(found)
    assert "its header" in str(found)
    ostraka.restore("memory://forged/header/step_1")


# No code of the program


class Spy:
    calls: list[str] = []  # noqa: RUF012


def spied(name: str) -> Callable[..., Any]:
    def method(self: Any, *given: Any) -> Any:
        Spy.calls.append(name)
        return None if name != "__hash__" else 1

    return method


class Descriptor:
    __set__ = spied("__set__")


@dataclasses.dataclass
class Registered:
    x: Any
    y: Any = 1
    __post_init__ = spied("__post_init__")
    __setattr__ = spied("__setattr__")


class Dying(Registered):
    __del__ = spied("__del__")


class Described(Registered):
    pass


Described.x = Descriptor()  # type: ignore[assignment]
for kind in (Registered, Dying, Described):
    jax.tree_util.register_dataclass(kind, data_fields=["x"], meta_fields=["y"])


class Node:
    __init__ = spied("__init__")


jax.tree_util.register_pytree_node(
    Node,
    lambda node: ((1,), None),
    lambda _, __: Spy.calls.append("unflatten"),  # type: ignore[arg-type]
)


class Tuple(NamedTuple("Tuple", [("x", Any)])):
    __new__ = spied("__new__")  # type: ignore[assignment]


class Colour(enum.Enum):
    RED = 1
    __hash__ = spied("__hash__")
    __eq__ = spied("__eq__")


class Watched(nnx.Param):
    from_metadata = classmethod(spied("from_metadata"))  # type: ignore[assignment]


def test_no_code_of_the_program_runs_because_a_checkpoint_names_it():
    def node(kind: str, name: str) -> Any:
        described = {kind: [__name__, name], "keys": ["x"], "items": [{"str": "value"}]}
        return described | ({"static": {"y": {"int": 5}}} if kind == "dataclass" else {})

    colour = {"enum": [__name__, "Colour", "RED", {"int": 1}]}
    tree = {
        "list": None,
        "items": [
            *(node("dataclass", name) for name in ("Registered", "Dying", "Described", "Node")),
            node("node", "Node"),
            node("namedtuple", "Tuple"),
            {"dict": [colour, "b"], "items": [None, None]},
            {"variable": [__name__, "Watched"], "about": {}, "items": [{"int": 1}]},
            0,
        ],
    }

    place = forge("code", lambda body: leaf(path="8")(body) or {"tree": tree})
    Spy.calls.clear()
    found = ostraka.restore(place)
    state = ostraka.restore(place, as_state=True)
    fuzz.open_all(place)
    assert Spy.calls == []
    registered, dying, described, plain, other, named, keys, variable, _ = found
    assert (type(registered), registered.x, registered.y) == (Registered, "value", 5)
    assert dying == described == plain == other == {"x": "value"}
    assert (type(named), named.x, variable) == (Tuple, "value", 1)
    assert keys == {1: None, "b": None}
    assert type(state[7]) is nnx.Variable


# Text that reaches a terminal


def with_escapes(value: Any, under: str = "") -> Any:
    """A document whose every text, where it may be any, begins with what a terminal acts on."""
    if isinstance(value, dict):
        return {
            key if key in _FIELDS else f"{ESCAPE}{key}": with_escapes(item, key)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [with_escapes(item, under) for item in value]
    return f"{ESCAPE}{value}" if isinstance(value, str) and under not in _FIXED else value


_FIXED = {"dtype", "factory", "float", "digest", "time", "types"}
_FIELDS = {
    *("dict", "list", "namedtuple", "dataclass", "node", "variable", "keys", "items", "static"),
    *("about", "kept", "structure", "str", "int", "float", "axes", "shape", "devices", "types"),
    *("path", "dtype", "layout", "mesh", "spec", "memory", "prng", "cast_from", "part"),
    *("ostraka", "jax", "python", "time", "hosts", "timeline", "ostraka.manager", "metrics"),
}


def make_escaping(body: Any) -> None:
    """Everything in `_METADATA` that is free text."""
    node = {"namedtuple": ["m", "T"], "keys": ["a", "b"], "items": [{"str": "s"}, None]}
    kept = {"kept": "f", "structure": False, "items": []}
    variable = {"variable": ["m", "V"], "about": {"note": {"str": "x"}}, "items": [{"int": 1}]}
    other = {"node": ["m", "N"], "keys": ["k"], "items": [variable]}
    body["tree"] = {"dict": ["w", "x", "f", "o"], "items": [0, node, kept, other]}
    body |= on_axis(1, ["x"])(body)
    body["writer"] |= {"hosts": ["h"], "ostraka": "1", "jax": "2", "timeline": {"write_s": 1.0}}
    body["user"] = {"note": "n", "ostraka.manager": {"step": 1, "metrics": {"loss": 1.0}}}
    for name in ("tree", "meshes", "writer", "user"):
        body[name] = with_escapes(body[name])
    spec = [[f"{ESCAPE}x"]]
    leaf(path=f"{ESCAPE}w", spec=spec, memory=f"{ESCAPE}device", cast_from="float64")(body)


COMMANDS = [
    ("show", "{a}"),
    ("show", "{a}", f"{ESCAPE}w"),
    ("show", "{a}", f"{ESCAPE}w", "--stats", "--slice", "0"),
    ("show", "{a}", "*", "--depth", "1"),
    ("show", "{a}", "--files", "--sort", "name"),
    ("show", "{a}", "--nan"),
    ("show", "{a}", "--json"),
    ("show", "{a}", "no such leaf"),
    ("diff", "{a}", "{b}"),
    ("diff", "{b}", "{a}", "--all"),
    ("diff", "{a}", "{b}", "--json"),
    ("verify", "{a}"),
    ("verify", "{broken}"),
    ("-v", "show", "{broken}"),
    ("-v", "plan", "{a}"),
    ("plan", "{a}"),
    ("plan", "{a}", "--mesh", "data=2"),
    ("plan", "{a}", "--json"),
    ("ls", "{root}"),
    ("ls", "{root}", "--verify"),
    ("ls", "{root}", "--json"),
    ("watch", "{root}", "--timeout", "0"),
    ("gc", "{root}", "--dry-run"),
    ("gc", "{root}", "--yes"),
    ("rm", "{root}", "1", "--dry-run", "--force"),
    ("copy", "{a}", "memory://forged/escaping-copy"),
]


def test_no_control_characters_reach_a_terminal():
    place = forge("escaping", make_escaping)
    plain = forge("escaping-plain", lambda body: None)
    broken = forge(
        "escaping-broken",
        lambda body: body.update(tree={"dict": ["w"], "items": [{f"{ESCAPE}x": f"{ESCAPE}y"}]}),
    )
    root = place.rpartition("/")[0]
    MemoryStore("forged/escaping").put(f"_LEASE-{ESCAPE}", b"")
    MemoryStore("forged/escaping").put(f"_METADATA.{ESCAPE}.tmp", b"")
    MemoryStore("forged/escaping/step_1").put(f"shards-{ESCAPE}", b"")
    places = {"a": place, "b": plain, "broken": broken, "root": root}
    for arguments in COMMANDS:
        given = [argument.format(**places) for argument in arguments]
        for environment in ({}, {"FORCE_COLOR": "1"}):
            result = run(*given, **environment)
            shown = result.stdout + result.stderr
            assert result.exit_code in (0, 1, 2), (given, shown)
            without_colours = fuzz.without_colours(shown) if environment else shown
            assert without_colours.replace("\n", "").isprintable(), (given, shown)
            assert "-v shows where" not in shown, (given, shown)
            assert "31m" not in shown or environment or "\\x1b[31m" in shown or "--json" in given


@pytest.mark.filterwarnings("ignore::ostraka.errors.PartialRestore")
def test_no_control_characters_in_messages():
    place = forge("escaping", make_escaping)
    choices: list[dict[str, Any]] = [
        {"like": {"w": 1}},
        {"like": {"w": 1}, "strict": False},
        {"only": "nothing"},
        {"mesh": {"y": 2}},
        {},
    ]
    for arguments in choices:
        try:
            ostraka.restore(place, **arguments)
        except OstrakaError as error:
            text = "".join(traceback.format_exception(error))
            assert text.replace("\n", "").isprintable(), text
    with pytest.warns(PartialRestore) as caught:
        ostraka.restore(place, like={f"{ESCAPE}w": np.zeros(16, np.float32), "z": 1}, strict=False)
    assert all(str(one.message).replace("\n", "").isprintable() for one in caught)


# Headers


def test_a_restore_of_one_leaf_sees_a_flip_in_the_header_of_its_file(tmp_path):
    path = tmp_path / "checkpoint"
    tree = {"a": np.arange(4.0), "b": np.arange(1 << 19), "empty": np.zeros((0, 3))}
    ostraka.save(path, {name: jax.device_put(a, jax.devices()[0]) for name, a in tree.items()})
    (shard,) = path.glob("shards-*/*.safetensors")
    for position in (0, 8, 100, 4000, 4095):
        flip(shard, position)
        for only in ("a", "b", "empty"):
            with pytest.raises(Damaged, match="its header is not as it was written"):
                ostraka.restore(path, only=only)
        with pytest.raises(Damaged, match="its header is not as it was written"):
            ostraka.open(path)["b"][3]
        flip(shard, position)
