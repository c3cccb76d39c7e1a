"""`ostraka diff`: what it prints, and its exit code."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import ostraka
from cli_runs import as_json, assert_fails, flip, put, run, save_model
from ostraka.cli._output import human_share
from places import Place
from replacing import replaced_once


def save(path: Place, **leaves: object) -> Place:
    ostraka.save(path, leaves)
    return path


def test_no_difference(place: Place):
    a, b = save_model(place / "a"), save_model(place / "b")
    result = run("diff", a, b)
    assert result.exit_code == 0
    assert result.stdout == f"a  {a}\nb  {b}\n\nno difference in 6 leaves\n"


def test_differences_are_listed(tmp_path: Path):
    values = np.ones((8, 4), np.float32)
    a = save(tmp_path / "a", same=1, x=values, s=put(values, "fsdp"), gone=values, n=100, t=[1])
    b = save(tmp_path / "b", same=1, x=values + 0.5, s=put(values, "tp"), n=200, t=(1,), new="text")
    result = run("diff", a, b)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert "container 't': a has list, b has tuple" in lines
    rows = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert rows["leaf"] == ["what", "changed", "largest", "mean", "relative"]
    assert "same" not in rows
    assert rows["x"] == ["values", "32", "(100", "%)", "0.5", "0.5", "0.3333"]
    assert " ".join(rows["s"]) == "P('fsdp') on fsdp=4, tp=2 → P('tp') on fsdp=4, tp=2 0 0 0 0"
    assert " ".join(rows["gone"]) == "only in a: float32 8 × 4"
    assert " ".join(rows["new"]) == "only in b: str 'text'"
    assert " ".join(rows["n"]) == "100 → 200"
    assert lines[-1] == (
        "7 leaves: 2 the same, 3 different, 1 only in a, 1 only in b, 1 container different"
    )


def test_all_leaves_on_request(tmp_path: Path):
    a = save(tmp_path / "a", x=np.ones(3), n=1)
    rows = run("diff", a, a, "--all").stdout.splitlines()
    assert [row.split() for row in rows[4:6]] == [["x", "same", "0", "0", "0", "0"], ["n", "same"]]


def test_as_json(tmp_path: Path):
    a = save(tmp_path / "a", x=np.array([1.0, np.nan, np.inf]), n=1)
    b = save(tmp_path / "b", x=np.array([2.0, 1.0, 0.0]))
    result = run("diff", a, b, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert (document["a"], document["b"], document["same"]) == (str(a), str(b), False)
    x, n = document["leaves"]
    assert x["differs"] == ["value"]
    assert x["elements"] == {
        "count": 3,
        "changed": 3,
        "nan": 1,
        "largest": "inf",
        "mean": "inf",
        "relative": "inf",
    }
    assert (n["a"]["value"], n["b"], n["same"]) == ("1", None, False)


def test_what_counts_as_a_difference(tmp_path: Path):
    a = save(tmp_path / "a", x=np.array([1.0]), n=1)
    b = save(tmp_path / "b", x=np.array([1.05]), n=1)
    for options, code in (
        ([], 1),
        (["--rtol", "0.1"], 0),
        (["--atol", "0.01"], 1),
        (["--atol", "0.1"], 0),
        (["--structure"], 0),
        (["n"], 0),
        (["n", "x"], 1),
    ):
        assert run("diff", a, b, *options).exit_code == code, options


def test_shardings_may_be_ignored(tmp_path: Path):
    a = save(tmp_path / "a", x=put(np.ones((8, 8)), "fsdp"))
    b = save(tmp_path / "b", x=put(np.ones((8, 8)), None, "tp"))
    assert run("diff", a, b).exit_code == 1
    assert run("diff", a, b, "--ignore-sharding").exit_code == 0


def test_damage_ends_with_1_and_one_line(model: Path, checkpoint: Path):
    flip(checkpoint)
    result = run("diff", model, checkpoint)
    assert_fails(result, f"checkpoint {checkpoint} is damaged: ", "(leaf 'kernel'", code=1)


def test_wrong_arguments(model: Path):
    for arguments, message in (
        (["nothing/**"], "no leaf matches 'nothing/**'"),
        (["--rtol", "-1"], "-1.0 is not in the range x>=0"),
        (["--atol", "much"], "'much' is not a valid float"),
        # It would make every element differ from itself.
        (["--rtol", "nan"], "'--rtol': nan is no tolerance; give a number such as 1e-5"),
        (["--atol", "nan"], "'--atol': nan is no tolerance; give a number such as 1e-5"),
    ):
        result = run("diff", model, model, *arguments)
        assert_fails(result, message, "(see ostraka diff --help)")


def test_steps_are_found_by_their_numbers(tmp_path: Path):
    runs = tmp_path / "runs"
    for step in (9, 10):
        save(runs / f"step_{step:08d}", x=step)
    result = run("diff", runs / "9", runs)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[:2] == [
        f"a  {runs}/step_00000009",
        f"b  {runs}/step_00000010",
    ]
    assert run("diff", runs / "10", runs).exit_code == 0
    assert_fails(run("diff", runs / "11", runs), "the steps in")


def test_a_checkpoint_that_is_replaced_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    a, b = save(tmp_path / "a", x=np.ones(3)), save(tmp_path / "b", x=np.zeros(3))
    with replaced_once(b, {"x": np.ones(3)}, monkeypatch):
        result = run("diff", a, b)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "no difference in 1 leaf" in result.stdout


def test_what_is_one_array_in_one_of_them_only(tmp_path: Path):
    x = jnp.arange(6.0)
    a, b = save(tmp_path / "a", x=x, y=x), save(tmp_path / "b", x=x, y=x + 0)
    result = run("diff", a, b)
    assert result.exit_code == 1
    assert "y     = x → its own array" in result.stdout


def test_a_subtree_that_only_one_has_is_one_line(tmp_path: Path):
    moments = {name: {str(n): np.ones(64) for n in range(5)} for name in ("mu", "nu")}
    model = {"w": np.ones(3), "b": np.ones(3)}
    a = save(tmp_path / "a", model=model, optimizer={"count": 1, **moments})
    b = save(tmp_path / "b", model={"w": np.ones(3), "c": np.ones(3)}, ema={"x": 1.0})
    result = run("diff", a, b)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert "only in a: optimizer (11 leaves, 5.0 KiB)" in lines
    assert "optimizer/" not in result.stdout
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line}
    assert rows["model/b"] == "only in a: float64 3"
    assert rows["model/c"] == "only in b: float64 3"
    assert rows["ema/x"] == "only in b: float 1.0"
    assert "optimizer/mu/3" in run("diff", a, b, "--all").stdout


def test_names_with_dots_are_folded_too(tmp_path: Path):
    for name, count in (("a", 4), ("b", 2)):
        (tmp_path / name).mkdir()
        tensors = {f"layers.{n}.{k}": np.ones(4, np.float32) for n in range(count) for k in "wb"}
        save_file(tensors, tmp_path / name / "model.safetensors")
    lines = run("diff", tmp_path / "a", tmp_path / "b").stdout.splitlines()
    assert lines[2:4] == [
        "only in a: layers.2 (2 leaves, 32 B)",
        "only in a: layers.3 (2 leaves, 32 B)",
    ]


def test_a_share_is_100_percent_only_if_all_differ(tmp_path: Path):
    shares = {10_000: "10,000 (100 %)", 9_999: "9,999 (<100 %)", 9_990: "9,990 (99.9 %)", 0: "0"}
    leaves = {f"x{changed}": np.zeros(10_000) for changed in shares}
    a = save(tmp_path / "a", **leaves)
    for changed in shares:
        leaves[f"x{changed}"] = (np.arange(10_000) < changed).astype(float)
    lines = run("diff", a, save(tmp_path / "b", **leaves), "--all").stdout.splitlines()
    for changed, shown in shares.items():
        (line,) = (line for line in lines if line.startswith(f"x{changed} "))
        assert f"  {shown}  " in line


def test_a_share_of_almost_nothing_is_not_0_percent():
    assert [human_share(part, 10**9) for part in (0, 1, 10**9 - 1)] == ["0 %", "<0.001 %", "<100 %"]


def test_relative_change(tmp_path: Path):
    a = save(tmp_path / "a", x=np.array([1.0, 2.0, 5.0]), zero=np.ones(2))
    b = save(tmp_path / "b", x=np.array([1.1, 2.2, 5.0]), zero=np.zeros(2))
    x, zero = as_json("diff", a, b)["leaves"]
    assert x["elements"]["relative"] == pytest.approx(0.3 / 3.3)
    assert zero["elements"]["relative"] == "inf"
    assert " 0.09091" in run("diff", a, b).stdout


def test_structure_is_names_shapes_and_dtypes(tmp_path: Path):
    values = np.ones((8, 8), np.float32)
    a = save(tmp_path / "a", x=put(values, "fsdp"), n=1, t=[1], y=values)
    b = save(tmp_path / "b", x=values * 2, n=2, t=(1,), y=values)
    assert run("diff", a, b).exit_code == 1
    result = run("diff", a, b, "--structure")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "no difference in 4 leaves")
    for other in ({"x": values[1:]}, {"x": values.astype(np.float64)}, {"n": 1.0}, {"z": 1}):
        c = save(tmp_path / "c", **({"x": values, "n": 1, "t": [1], "y": values} | other))
        assert run("diff", a, c, "--structure").exit_code == 1, other


def test_many_differences_are_folded_to_the_screen(tmp_path: Path):
    def tree(value: float) -> dict[str, object]:
        return {str(n): {"w": np.full(4, value), "b": np.ones(2)} for n in range(60)}

    a, b = save(tmp_path / "a", blocks=tree(1.0)), save(tmp_path / "b", blocks=tree(2.0))
    result = run("diff", a, b, LINES="24", COLUMNS="80")
    lines = result.stdout.splitlines()
    assert (result.exit_code, len(lines) < 24) == (1, True)
    (row,) = (line.split() for line in lines if line.startswith("blocks/"))
    assert row == ["blocks/0..59/w", "values", "×60", "240", "(100", "%)", "1", "1", "0.5"]
    assert "blocks/17/w" in run("diff", a, b, "--all").stdout
