"""A Python that has torch and transformers: that of .venv-torch, or of OSTRAKA_HF_PYTHON."""

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

TORCH_PYTHON = Path(__file__).parents[2] / ".venv-torch" / "bin" / "python"


@cache
def find_python() -> str | None:
    for python in (os.environ.get("OSTRAKA_HF_PYTHON"), str(TORCH_PYTHON)):
        if python is not None and Path(python).exists():
            code = "import importlib.util as u; assert u.find_spec('torch')"
            command = [python, "-c", f"{code} and u.find_spec('transformers')"]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return python
    return None


def transformers_python() -> str:
    """Its path; skips the test, and says so, if there is none."""
    python = find_python()
    if python is None:
        pytest.skip(
            "transformers IS NOT INSTALLED in .venv-torch, so nothing is compared with it; "
            "`make torch` does that, or OSTRAKA_HF_PYTHON names another Python that has it"
        )
    return python


PROGRAM = Path(__file__).parent / "hf_logits.py"


@cache
def _program() -> subprocess.Popen[str]:
    """Importing transformers takes seconds, so it is done once. It ends with its stdin."""
    return subprocess.Popen(
        [transformers_python(), PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _ask(task: dict[str, Any]) -> Any:
    program = _program()
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(json.dumps(task) + "\n")
    program.stdin.flush()
    return json.loads(program.stdout.readline())


def write_models(root: Path, configs: dict[str, Any], *, logits: bool = True) -> Path:
    """Have `save_pretrained` write directories."""
    assert _ask({"root": str(root), "configs": configs, "logits": logits}) == []
    return root


def assert_transformers_loads(directory: Path, as_in: Path) -> None:
    """All of a directory, for the same logits."""
    for name in ("config.json", "tokens.npy"):
        if not (directory / name).exists():
            (directory / name).write_bytes((as_in / name).read_bytes())
    assert _ask({"load": str(directory)}) == []
    np.testing.assert_array_equal(np.load(directory / "logits.npy"), np.load(as_in / "logits.npy"))


def assert_logits(model: Any, directory: Path) -> None:
    """A model of NNX has the logits that `transformers` had."""
    tokens = jnp.asarray(np.load(directory / "tokens.npy"))
    logits = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, tokens))
    wanted = np.load(directory / "logits.npy")
    assert wanted.std() > 0.5
    np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)
