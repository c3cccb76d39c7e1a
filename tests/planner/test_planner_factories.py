"""Functions that make models, planned: found by module or file, run under a mesh without devices.

What is planned for models that say themselves how they are cut is compared with what is saved of
the real ones, made on eight devices.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ostraka
from cli_runs import assert_fails, planned, run
from ostraka import plan

HERE = Path(__file__).stem
SIZES = {"data": 4, "model": 2}
CUT = (("data",), ("model",))


class Annotated(nnx.Module):
    """Variables that name axes of the mesh, in the three ways there are."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model"))
        self.up = nnx.Linear(64, 128, kernel_init=init, rngs=rngs)
        self.down = nnx.Param(jnp.ones((128, 64)), out_sharding=P("model", "data"))
        self.scale = nnx.Param(jnp.ones(64), out_sharding=("data",))


class Logical(nnx.Module):
    """Variables whose names become axes by rules that are in force while they are made."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Param(jax.random.normal(rngs(), (64, 128)), out_sharding=("embed", "mlp"))
        self.scale = nnx.Param(jnp.ones(64), out_sharding=("embed",))


class Explicit(nnx.Module):
    """Arrays that are made where they are to be; the variables say nothing."""

    def __init__(self, rngs: nnx.Rngs):
        spec = P("data", "model")
        self.up = nnx.Param(jax.random.normal(rngs(), (64, 128), out_sharding=spec))
        self.down = nnx.Param(jax.sharding.reshard(jnp.ones((128, 64)), P("model")))
        self.bias = nnx.Param(jnp.zeros(128))


def make_annotated() -> nnx.Module:
    return Annotated(nnx.Rngs(0))


def make_logical() -> nnx.Module:
    with nnx.logical_axis_rules([("embed", None), ("mlp", "model")]):
        return Logical(nnx.Rngs(0))


def make_explicit() -> nnx.Module:
    return Explicit(nnx.Rngs(0))


def make_pair() -> Any:
    model = make_annotated()
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def make_linen() -> Any:
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "model"))
    return nn.Dense(128, kernel_init=init).init(jax.random.key(0), jnp.ones((1, 64)))


def make_linen_logical() -> Any:
    rules = (("embed", "data"), ("mlp", "model"))
    init = nn.with_logical_partitioning(
        nn.initializers.lecun_normal(), ("embed", "mlp"), rules=rules
    )
    return nn.Dense(128, kernel_init=init).init(jax.random.key(0), jnp.ones((1, 64)))


def make_without_rules() -> Any:
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    return nn.Dense(128, kernel_init=init).init(jax.random.key(0), jnp.ones((1, 64)))


def make_constrained() -> Any:
    """Written for automatic axes; that it is cut is for the compiler, and nobody sees it here."""
    constrained = jax.lax.with_sharding_constraint(jnp.ones((64, 128)), P("data", "model"))
    return {"kernel": constrained}


def make_own_mesh() -> Any:
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        return make_annotated()


def partitions(planned: ostraka.Plan) -> dict[str, Any]:
    return {leaf.spec.path: leaf.spec.partition for leaf in planned._write.leaves}


def saved_partitions(path: Path, make: Callable[[], Any], kind: AxisType) -> dict[str, Any]:
    """Those of the checkpoint of a real model, made and saved on eight devices."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), (kind, kind))
    with jax.set_mesh(mesh):
        ostraka.save(path, nnx.jit(make)())
    return partitions(plan(path))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (make_annotated, AxisType.Explicit),
        (make_annotated, AxisType.Auto),
        (make_logical, AxisType.Explicit),
        (make_explicit, AxisType.Explicit),
    ],
    ids=["annotated, explicit", "annotated, auto", "logical", "explicit"],
)
def test_a_model_is_planned_as_it_is_then_saved(
    tmp_path: Path, make: Callable[[], Any], kind: AxisType
):
    expected = plan(f"{HERE}:{make.__name__}", mesh=SIZES, processes=1)
    found = saved_partitions(tmp_path / "c", make, kind)
    assert partitions(expected) == found
    assert any(any(partition) for partition in found.values())


@pytest.mark.parametrize(
    ("make", "optimizer"),
    [(make_annotated, "adamw"), (make_explicit, "adamw"), (make_annotated, "adafactor")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_optimizer_goes_along(make: Callable[[], Any], optimizer: str):
    found = partitions(plan(f"{HERE}:{make.__name__}", mesh=SIZES, optimizer=optimizer))
    moment = "mu" if optimizer == "adamw" else "v"
    assert found["model/down"] == found[f"optimizer/opt_state/0/{moment}/down"] != ()
    pair = partitions(plan(f"{HERE}:make_pair", mesh=SIZES))
    assert pair["model/up/kernel"] == pair["optimizer/opt_state/0/nu/up/kernel"] == CUT


@pytest.mark.parametrize("make", [make_linen, make_linen_logical], ids=["axes", "logical"])
def test_boxes_of_linen_say_how_they_are_cut(make: Callable[[], Any]):
    found = partitions(plan(f"{HERE}:{make.__name__}", mesh=SIZES))
    assert found == {"params/bias": (), "params/kernel/value": CUT}
    with_optimizer = partitions(plan(f"{HERE}:{make.__name__}", mesh=SIZES, optimizer="adamw"))
    assert with_optimizer["optimizer/0/mu/params/kernel/value"] == CUT


def test_rules_come_before_what_a_model_says():
    for name in ("make_annotated", "make_linen", "make_without_rules"):
        found = partitions(plan(f"{HERE}:{name}", mesh={"fsdp": 8}, specs="fsdp"))
        assert {axes for cut in found.values() for axes in cut} == {(), ("fsdp",)}
    found = partitions(plan(f"{HERE}:make_constrained", mesh=SIZES, specs="fsdp"))
    assert found == {"kernel": ((), ("data",))}


def test_the_mesh_of_the_command_line_is_set_too():
    made = planned(f"{HERE}:make_explicit", "--mesh", "data=4,model=2")
    lost = made["recovery"]["lost_host"]
    assert lost["held_bytes"] == 2 * 64 * 128 * 4 + 128 * 4


@pytest.mark.parametrize(
    ("name", "arguments", "messages"),
    [
        (
            "make_annotated",
            ["--mesh", "x=8"],
            ["the mesh (x=8) has no axis 'data'", "give some (--rules, specs=), or a mesh with"],
        ),
        (
            "make_without_rules",
            ["--mesh", "data=4,model=2"],
            ["leaf 'params/kernel/value', dimension 0", "has no axis 'embed'", "(--rules"],
        ),
        (
            "make_explicit",
            [],
            ["raised ValueError: Using PartitionSpec", "give a mesh (--mesh data=8), which is"],
        ),
        (
            "make_own_mesh",
            ["--mesh", "data=8"],
            ["raised ValueError: `set_mesh` can only be", "(data=8) set, and need not make or set"],
        ),
    ],
)
def test_functions_that_do_not_fit_the_mesh(name: str, arguments: list[str], messages: list[str]):
    assert_fails(run("plan", f"{HERE}:{name}", *arguments), *messages)


# Files


PROGRAM = """
from dataclasses import dataclass

from flax import nnx

from beside_the_program import WIDTH

@dataclass
class Sizes:
    width: "int" = WIDTH

class Makers:
    @staticmethod
    def make():
        return nnx.Linear(Sizes().width, 128, rngs=nnx.Rngs(0))

make = Makers.make
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "beside_the_program.py").write_text("WIDTH = 64\n")
    (tmp_path / "a program.py").write_text(PROGRAM)
    return tmp_path / "a program.py"


@pytest.mark.parametrize("name", ["make", "Makers.make"])
def test_a_function_in_a_file(program: Path, name: str):
    assert planned(f"{program}:{name}", "--mesh", "data=8")["parameters"] == 64 * 128 + 128
    assert plan(f"{program}:{name}").parameters == 64 * 128 + 128


def test_files_that_can_not_be_planned(program: Path, tmp_path: Path):
    (tmp_path / "broken.py").write_text("1 / 0")
    for source, message in (
        (program, f"{program} is a Python file: name the function, as in {program}:make"),
        (f"{program}:mak", f"{program} has no 'mak' (did you mean 'make'?)"),
        (f"{tmp_path}/nowhere.py:make", f"there is no file {tmp_path}/nowhere.py"),
        (f"{tmp_path}/broken.py:make", "ZeroDivisionError: division by zero"),
    ):
        assert_fails(run("plan", source), message)
