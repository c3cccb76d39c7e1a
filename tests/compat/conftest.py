"""Fixtures of the tests that run Orbax."""

import logging

import pytest


@pytest.fixture
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
