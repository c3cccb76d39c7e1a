"""Fixtures of the tests that run Orbax."""

import gc
import logging
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def _collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Orbax leaves coroutines behind when it fails. They raise when they are collected: now.

    Otherwise that fails some test which runs later.
    """
    yield
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    gc.collect()
