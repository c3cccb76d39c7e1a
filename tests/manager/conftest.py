"""Run directories in every kind of store."""

from pathlib import Path
from typing import Any

import pytest

from places import place_of_kind


@pytest.fixture(params=["directory", "memory", "without locks", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """What a Manager may be given. A file that needs one kind only has a fixture of its own."""
    return place_of_kind(request.param, "runs", request, tmp_path)
