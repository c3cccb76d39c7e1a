"""A Python that has torch and transformers: that of .venv-torch, or of OSTRAKA_HF_PYTHON."""

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

TORCH_PYTHON = Path(__file__).parents[2] / ".venv-torch" / "bin" / "python"


@cache
def find_python() -> str | None:
    for python in (os.environ.get("OSTRAKA_HF_PYTHON"), str(TORCH_PYTHON)):
        if python is not None and Path(python).exists():
            command = [python, "-c", "import torch, transformers"]
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
