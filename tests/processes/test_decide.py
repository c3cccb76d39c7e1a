"""Decisions of process 0 reach all processes, and so do its errors."""

from typing import Any

import pytest

from ostraka import errors
from ostraka.processes.decide import decide_together
from ostraka.testing import run_processes

ERRORS: dict[str, Any] = {
    "Busy": lambda: errors.Busy("it is taken"),
    "SourceChanged": lambda: errors.SourceChanged("it was replaced"),
    "TooLarge": lambda: errors.TooLarge("/run/_METADATA", 3, 2),
    "NotDurable": lambda: errors.NotDurable("it may be undone"),
}


def fail(kinds: list[str]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for kind in kinds:

        def raise_it(kind: str = kind) -> None:
            raise ERRORS[kind]()

        try:
            decide_together("a decision", raise_it)
        except errors.OstrakaError as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_errors_and_their_subclasses_are_raised_on_all_processes():
    results = run_processes(fail, [*ERRORS], processes=2)
    expected = [
        ("Busy", "it is taken"),
        ("Busy", "it was replaced"),
        ("StoreError", "can't read /run/_METADATA: it has 3 bytes, and may have 2 at most"),
        ("StoreError", "it may be undone"),
    ]
    assert [result.value for result in results] == [expected, expected]


def test_a_process_alone_raises_the_error_itself():
    with pytest.raises(errors.TooLarge, match="at most"):
        decide_together("a decision", lambda: (_ for _ in ()).throw(ERRORS["TooLarge"]()))
