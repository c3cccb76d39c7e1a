"""`ostraka plan`: what it prints, its exit codes, and one line for everything that is wrong."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click.testing import Result
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from cli_runs import assert_fails, closed, planned
from cli_runs import run as run_command
from ostraka.common.units import human_bytes


def run(*arguments: object) -> Result:
    return run_command("plan", *arguments)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    kernel = jax.device_put(jnp.ones((64, 32)), NamedSharding(mesh, P("data", "model")))
    ostraka.save(tmp_path / "c", {"kernel": kernel, "table": np.ones(5), "step": 3})
    return tmp_path / "c"


# Sources


def make_model() -> nnx.Module:
    return nnx.Linear(64, 128, rngs=nnx.Rngs(0))


def make_pair() -> Any:
    model = make_model()
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def make_nothing() -> None:
    pass


def make_trouble() -> None:
    raise RuntimeError("no such luck")


def make_exit() -> None:
    raise SystemExit(7)


def make_noise() -> nnx.Module:
    print("making a model")
    return make_model()


FACTORY = f"{Path(__file__).stem}:make_model"
PAIR = f"{Path(__file__).stem}:make_pair"


def test_a_built_in_name():
    found = planned("gpt2", "--mesh", "data=8", "--optimizer", "adamw", "--hosts", "2")
    assert found["parameters"] == 124_439_808
    assert found["data_bytes"] == 3 * 4 * 124_439_808 + 8
    assert (found["devices"], found["hosts"]) == (8, 2)
    assert found["groups"]["optimizer mu"]["bytes"] == 4 * 124_439_808


def test_the_largest_plan():
    """How long it takes is measured in bench/plan_scaling.py."""
    arguments = ["--mesh", "data=2048,model=8", "--hosts", "2048", "--optimizer", "adamw"]
    found = planned("llama-3.1-405b", *arguments)
    assert found["parameters"] == 405_853_388_800
    assert (found["devices"], found["hosts"], found["files"]["shards"]) == (16384, 2048, 16384)
    assert found["metadata_bytes"] <= 4 << 20
    assert found["host_bytes"]["skew"] <= 0.05
    assert not found["index_bytes_are_exact"]
    assert found["restore"]["hosts_worked_out"] == 1
    result = run("llama-3.1-405b", *arguments, "--onto", "data=1,model=8")
    assert_fails(result, "pieces of files together, too many to plan")


def test_dtypes_of_model_and_optimizer():
    found = planned(
        "gpt2", "--dtype", "bfloat16", "--optimizer", "adam", "--optimizer-dtype", "float32"
    )
    assert found["groups"]["model"]["dtypes"] == {"bfloat16": 2 * 124_439_808}
    assert found["groups"]["optimizer nu"]["dtypes"] == {"float32": 4 * 124_439_808}


def test_a_config_and_its_directory(tmp_path: Path):
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_file = planned(tmp_path / "config.json")
    assert by_file["parameters"] == planned(tmp_path)["parameters"] > 0


def test_a_factory():
    found = planned(FACTORY, "--mesh", "data=8", "--rules", "fsdp", "--optimizer", "adam")
    pair = planned(PAIR, "--mesh", "data=8", "--rules", "fsdp")
    assert found["parameters"] == pair["parameters"] == 64 * 128 + 128
    assert found["data_bytes"] == pair["data_bytes"]
    assert found["files"] == pair["files"]
    assert planned(FACTORY)["devices"] == 1


def test_a_checkpoint(checkpoint: Path):
    found = planned(checkpoint)
    names = {file: file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()}
    assert found["total_bytes"] == sum(names.values())
    assert found["files"]["in_all"] == len(names)
    assert found["metadata_bytes"] == (checkpoint / "_METADATA").stat().st_size


def test_a_checkpoint_on_another_mesh(checkpoint: Path):
    found = planned(checkpoint, "--mesh", "data=8,model=1", "--hosts", "2", "--dtype", "bfloat16")
    assert found["data_bytes"] == 64 * 32 * 2 + 5 * 2
    rules = planned(checkpoint, "--mesh", "data=8", "--rules", "dp", "--hosts", "2")
    assert rules["recovery"]["lost_host"]["sole_bytes"] == 0


# Questions


@pytest.mark.parametrize(
    ("source", "pattern", "optimizer"),
    [("gpt2", "wte/embedding", "adam"), ("gpt2", "**/kernel", "none"), (FACTORY, "kernel", "adam")],
)
def test_patterns_of_rules_see_paths_in_the_model(
    tmp_path: Path, source: str, pattern: str, optimizer: str
):
    file = tmp_path / "rules.json"
    arguments = [source, "--mesh", "x=2", "--rules", file, "--optimizer", optimizer]
    file.write_text(json.dumps({pattern: [None, ["x"]], "**": None}))
    assert planned(*arguments)["parameters"]
    file.write_text(json.dumps({f"model/{pattern}": [None, "x"], "**": None}))
    assert_fails(run(*arguments), f"specs={{'model/{pattern}': …}} matches no leaf")


def test_times_storage_and_advice():
    arguments = ["--write-bandwidth", "1GB", "--read-bandwidth", "2GB/s", "--mtbf", "4h"]
    found = planned("gpt2", "--mesh", "data=8", "--hosts", "4", "--keep", "3", *arguments)
    assert found["save"]["duration_s"] == found["host_bytes"]["most"] / 1e9
    assert found["restore"]["duration_s"] == found["restore"]["read_bytes"]["most"] / 2e9
    assert found["save"]["peak_bytes_per_second"] == 4e9
    assert found["retention"]["bytes"] == 3 * found["total_bytes"]
    assert found["retention"]["bytes_while_saving"] == 4 * found["total_bytes"]
    assert found["interval"]["mtbf_s"] == 4 * 3600
    assert 0 < found["interval"]["save"]["lost_share"] < 0.1
    assert found["interval"]["save_async"] is None
    slow = planned("gpt2", "--write-bandwidth", "1TB", "--storage-bandwidth", "1MB")
    assert slow["save"]["duration_s"] == slow["total_bytes"] / 1e6


def test_probing_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ostraka.planner.time._PROBE_BYTES", 1 << 20)
    found = planned("gpt2", "--probe", tmp_path)
    assert found["save"]["duration_s"] > 0
    assert found["restore"]["duration_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_onto_another_mesh():
    found = planned("gpt2", "--mesh", "data=8", "--onto", "data=16", "--onto", "data=2")
    larger, smaller = found["onto"]
    assert larger["mesh"] == {"data": 16}
    assert larger["hosts"] == 2
    assert smaller["read_bytes"]["most"] >= smaller["needed_bytes"]["most"] > 0


def test_warnings_are_shown():
    arguments = ["gpt2", "--mesh", "data=8", "--rules", "dp"]
    (finding,) = planned(*arguments)["findings"]
    assert finding["severity"] == "warning"
    assert "wte/embedding" in finding["message"]
    assert "warning leaf 'wte/embedding'" in run(*arguments).stdout


def test_limits_set_the_exit_code():
    within = run("gpt2", "--mesh", "data=8", "--max-file", "1GiB", "--max-host-memory", "64GiB")
    assert within.exit_code == 0
    assert "within --max-file" in within.stdout
    exceeded = run("gpt2", "--mesh", "data=8", "--max-file", "5MB", "--json")
    assert exceeded.exit_code == 3
    (limit,) = json.loads(exceeded.stdout)["variants"][0]["limits"]
    assert not limit["ok"]
    assert run("gpt2", "--max-host-memory", "1MB").exit_code == 3
    assert planned("gpt2", "--max-file-bytes", "5MB", "--max-file", "5MB")["limits"][0]["ok"]


def test_variants_side_by_side():
    result = run(
        "gpt2", "--mesh", "data=8", "--compare", "--rules dp", "--compare", "--mesh data=16"
    )
    assert result.exit_code == 0
    assert "compared" in result.stdout
    document = json.loads(run("gpt2", "--compare", "--dtype bfloat16", "--json").stdout)
    (row,) = [row for row in document["comparison"] if row["key"] == "total_bytes"]
    assert row["best"] == ["--dtype bfloat16"]
    assert set(row["values"]) == {"gpt2", "--dtype bfloat16"}


# What it looks like


def test_tables_have_everything():
    arguments = ["--write-bandwidth", "1GB", "--read-bandwidth", "1GB", "--device-bandwidth", "9GB"]
    result = run("gpt2", "--mesh", "data=8", "--onto", "data=4", "--keep", "2", *arguments)
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    for text in (
        "124,439,808",
        "largest file",
        "skew of hosts",
        "staging memory of a host",
        "blocked by save_async",
        "peak I/O, all hosts",
        "restore onto data=4, 1 host",
        "over-read",
        "a host's disk",
        "storage for 2",
        "█",
    ):
        assert text in result.stdout


def test_text_of_a_checkpoint_does_not_reach_the_terminal_raw(tmp_path: Path):
    ostraka.save(tmp_path / "odd", {"\x1b[31mred": np.ones(2), "[bold]": np.ones(2)})
    output = run(tmp_path / "odd").stdout
    assert "\x1b" not in output
    assert r"\x1b[31mred" in output
    assert "[bold]" in output


# What is wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'SOURCE' (see ostraka plan --help)"),
        (["lama-3.1-8b"], "(did you mean 'llama-3.1-8b'?)"),
        (["runs/nowhere"], "there is no checkpoint at "),
        ([Path(__file__).parents[1] / "data" / "hf_models.json"], "has no 'model_type'"),
        ([Path(__file__).parents[2] / "LICENSE"], "is a file, not a checkpoint directory"),
        (["gopher://x"], "has no store for gopher://"),
        (["no_such_module:make"], "can't import 'no_such_module'"),
        (["json:no_such"], "json has no 'no_such'"),
        (["json:__doc__"], "it must be a function"),
        ([f"{Path(__file__).stem}:make_nothing"], "returns nothing; it must return a model"),
        ([f"{Path(__file__).stem}:make_trouble"], "raised RuntimeError: no such luck"),
        ([FACTORY, "--rules", "fsdp"], "rules and hosts need a mesh, such as --mesh data=8"),
        ([FACTORY, "--optimizer-dtype", "float32"], "leave --optimizer-dtype out, or"),
        (["gpt2", "--mesh", "data=8", "--hosts", "3"], "do not divide evenly among 3 processes"),
        (["gpt2", "--mesh", "data"], "'data' is no mesh; write it as data=64,model=8"),
        (["gpt2", "--mesh", "data=0"], "'data=0' is no mesh"),
        (["gpt2", "--mesh", "a=2,a=2"], "'a=2,a=2' is no mesh"),
        (["gpt2", "--mesh", "x=8", "--rules", "fsdp"], "need a mesh axis named fsdp or data or dp"),
        (["gpt2", "--rules", "fdsp"], "there are no rules 'fdsp' (did you mean 'fsdp'?)"),
        (["gpt2", "--optimizer", "adamm"], "there is no optimizer 'adamm'"),
        (["gpt2", "--dtype", "float33"], "there is no dtype 'float33'"),
        (["gpt2", "--max-file", "big"], "'big' is no size; write it as 5GiB"),
        (["gpt2", "--max-file", "1e999"], "'1e999' is no size: it must be at least a byte"),
        (["gpt2", "--mtbf", "9" * 400 + "h"], "is no duration; write it as 4h"),
        (["gpt2", "--max-file-bytes", "10"], "it must be at least 8,192"),
        (["gpt2", "--mtbf", "soon"], "'soon' is no duration; write it as 4h"),
        (["gpt2", "--mtbf", "4h"], "give --write-bandwidth or --probe"),
        (["gpt2", "--probe", "/nowhere/at/all"], "can't measure the speed of /nowhere/at/all"),
        (["gpt2", "-o", "/nowhere/plan.json"], "can't write /nowhere/plan.json"),
        (["gpt2", "--compare", "--json"], "can't have options of the whole command"),
        (["gpt2", "--compare", "--wrong"], "No such option"),
        (["gpt2", "--onto", "data=7", "--mesh", "data=8"], "do not divide into 7 parts"),
        (["gpt2", "--keep", "0"], "Invalid value for '--keep'"),
        (["gpt2", "--rules", "/"], "can't read the rules in /: Is a directory"),
        (["gpt2", "--mesh", "data=999999999999"], "at most 1,048,576 can be planned for"),
        (["gpt2", "--onto-hosts", "3"], "--onto-hosts goes with --onto"),
        (["gpt2", "--compare", "--names"], "can't have options of the whole command"),
        (["gpt2", "--compare", "-h"], "can't have options of the whole command"),
        (["gpt2", "--compare", ""], "the variant '' changes nothing"),
        ([f"{Path(__file__).stem}:make_exit"], "raised SystemExit: 7"),
    ],
    ids=lambda value: " ".join(map(str, value))[:60] if isinstance(value, list) else "",
)
def test_an_error_is_one_line_on_stderr(arguments: list[Any], message: str):
    assert_fails(run(*arguments), message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be a JSON object of patterns and specs"),
        ("{", "are not JSON"),
        pytest.param("[" * 100_000, "are not JSON", id="deep"),
        ('{"**": "x"}', "a spec is a list with an axis"),
        ('{"**": [[1]]}', "a spec is a list with an axis"),
        ('{"**/kernal": ["x"], "**": null}', "specs={'**/kernal': …} matches no leaf"),
        ('{"**/kernel": ["x"]}', "no pattern matches"),
        ('{"**": ["x"]}', "do not divide into 7 parts"),
    ],
)
def test_rules_that_do_not_fit(tmp_path: Path, text: str, message: str):
    (tmp_path / "rules.json").write_text(text)
    assert_fails(run("gpt2", "--mesh", "x=7", "--rules", tmp_path / "rules.json"), message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def (", "can't import 'odd_module' for 'odd_module:make': SyntaxError: invalid syntax"),
        ("1 / 0", "'odd_module:make': ZeroDivisionError: division by zero"),
        ("raise SystemExit(4)", "'odd_module:make': SystemExit: 4"),
    ],
    ids=["syntax", "error", "exit"],
)
def test_modules_that_can_not_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
):
    (tmp_path / "odd_module.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert_fails(run("odd_module:make"), message)


def test_what_a_factory_prints_does_not_spoil_the_json():
    result = run(f"{Path(__file__).stem}:make_noise", "--json")
    assert json.loads(result.stdout)["variants"][0]["parameters"] > 0
    assert "making a model" in result.stderr


def test_axes_with_odd_names():
    result = run("gpt2", "--mesh", "data=2", "--rules", "dp", "--onto", "[/bold]=2")
    assert result.exit_code == 0
    assert "restore onto [/bold]=2, 1 host" in result.stdout


def test_checkpoints_that_can_not_be_read(checkpoint: Path):
    assert run(checkpoint).exit_code == 0
    with closed(checkpoint.parent, ".") as path:
        result = run(path / "c")
    assert_fails(result, "Permission denied")
    metadata = checkpoint / "_METADATA"
    metadata.write_bytes(metadata.read_bytes().replace(b'"kernel"', b'"kernal"'))
    assert_fails(run(checkpoint), "damaged", code=1)


def small_config(**changes: Any) -> str:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "vocab_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    return json.dumps(config | changes)


def test_keys_of_a_config_that_mean_nothing(tmp_path: Path):
    """Among them some that are names inside the planner."""
    found: list[int] = []
    for number, odd in enumerate(({}, {"norms": 5, "experts": 1, "norms_of_heads": 1})):
        file = tmp_path / f"{number}.json"
        file.write_text(small_config(**odd))
        found.append(planned(file)["parameters"])
    assert found[0] == found[1]


def test_configs_that_can_not_be_planned(tmp_path: Path):
    config = tmp_path / "config.json"
    for text, message in (
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"model_type": ["llama"]}', "those that can be planned are llama"),
        (small_config(head_dim=-3), "has -3 as its 'head_dim'; it must be a positive integer"),
        (small_config(head_dim=16.0), "has 16.0 as its 'head_dim'"),
        (small_config(num_key_value_heads="two"), "has 'two' as its 'num_key_value_heads'"),
        (small_config(num_hidden_layers=10**12), "'num_hidden_layers'; it must be a positive"),
        ('{"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_inner": "x"}', "its 'n_inner'"),
    ):
        config.write_text(text)
        assert_fails(run(config), message)


SUMMARY = ("parameters", "bytes", "files", "per host", "time", "recovery")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {"time": "unknown; give a bandwidth, or --probe DIR"}),
        (
            ("--optimizer", "adamw", "--write-bandwidth", "1GB/s", "--read-bandwidth", "1GB/s"),
            {"parameters": "124,439,808"},
        ),
        (("--parity", "1", "--hosts", "8"), {}),
        (("--compress", "zstd"), {}),
    ],
    ids=["alone", "bandwidth", "parity", "compress"],
)
def test_a_plan_opens_with_six_lines(options: tuple[str, ...], expected: dict[str, str]):
    arguments = ("gpt2", "--mesh", "data=8", *options)
    lines = run(*arguments).stdout.splitlines()
    assert lines[0].startswith("gpt2  mesh data=8, 8 devices on ")
    assert tuple(line[:10].strip() for line in lines[1:7]) == SUMMARY
    assert lines[7] == ""
    found = {line[:10].strip(): line[12:] for line in lines[1:7]}
    assert expected.items() <= found.items()
    plan = json.loads(run(*arguments, "--json").stdout)["variants"][0]
    assert human_bytes(plan["total_bytes"]) in found["bytes"]
    assert found["per host"] == f"{human_bytes(round(plan['host_bytes']['most']))} at most"
    assert found["files"].startswith(f"{plan['files']['in_all']}, the largest ")
    assert ("save " in found["time"]) is ("--write-bandwidth" in options)
    assert ("parity covers any 1 host" in found["recovery"]) is ("--parity" in options)


def test_the_plan_of_a_checkpoint_opens_with_its_elements(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"x": np.ones((4, 4)), "y": np.ones(4)})
    lines = run(tmp_path / "c").stdout.splitlines()
    assert lines[1] == "parameters  20 elements in 2 arrays"
