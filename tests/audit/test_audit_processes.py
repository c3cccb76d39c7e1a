"""Audits across processes, and on another number of them."""

from pathlib import Path

from ostraka.testing import run_processes
from places import copy_tree


def train(directory: str, drops_moments: bool) -> tuple[int, str]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import ostraka

    mesh = Mesh(np.array(jax.devices()), ("d",))
    tx = optax.sgd(0.5, momentum=0.5)
    sharded, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    make = jax.jit(lambda: jnp.arange(32.0).reshape(16, 2), out_shardings=sharded)
    init = jax.jit(tx.init, out_shardings=sharded)
    step = jax.jit(lambda p, o: tx.update(p * 0.5, o), out_shardings=(sharded, sharded))
    add = jax.jit(lambda a, b: a + b, out_shardings=sharded)
    params = make()
    shift = jax.jit(lambda: jnp.float32(1), out_shardings=whole)()
    state = {"params": params, "opt_state": init(params), "shift": shift, "n": np.arange(3)}
    with ostraka.Manager(directory, every=2, audit_every=1) as manager:
        start = manager.resume(state)
        if drops_moments:
            state["opt_state"] = init(state["params"])
        try:
            for number in range(start + 1, 5 if start else 4):
                updates, state["opt_state"] = step(state["params"], state["opt_state"])
                state["params"] = add(state["params"], updates)
                manager.save(number, state, audit={"batch": np.full(3, number)})
        except ostraka.errors.ResumeDiverged as error:
            return error.step, error.cause
    return start, ""


def test_processes_compare_with_a_run_of_another_number(tmp_path: Path):
    """All values are small whole numbers of halves, so that any mesh computes the same bits."""
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    run_processes(train, str(right), False, processes=2, devices_per_process=2)
    copy_tree(right, wrong)
    (one,) = run_processes(train, str(right), False, processes=1, devices_per_process=2)
    assert one.value == (2, "")
    for result in run_processes(train, str(wrong), True, processes=2, devices_per_process=1):
        step, cause = result.value
        assert step == 3
        assert "moments were not restored" in cause
