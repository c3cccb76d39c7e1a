"""Operations of several members of one real coordination service, all in this process.

That real processes hear of each other's failures is tested in test_failures.py and test_kill.py.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from bench.coordination import (
    TABLE_BEGINS,
    TABLE_ENDS,
    make_table,
    many_members,
    on_all,
    save,
    with_table,
)

from ostraka.errors import Busy
from ostraka.processes import operation as _coordinate
from ostraka.processes.operation import Operation, ProcessFailed
from ostraka.processes.service import Keys, Member

NEVER_S = 1000.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is given up, and no roll is called, because the machine is busy."""
    for name in ("DEAD_AFTER_S", "ARRIVE_WITHIN_S", "_VERDICT_WITHIN_S"):
        monkeypatch.setattr(_coordinate, name, NEVER_S)


def caught(work: Any) -> str:
    try:
        return f"returned {work()}"
    except (ProcessFailed, KeyboardInterrupt, Busy) as error:
        return f"{type(error).__name__}: {error}"


def sum_up(member: Member, *, is_last: bool = True) -> int:
    with Operation("sum", member=member) as operation:
        return operation.exchange("sum", member.process, sum, is_last=is_last)


def listeners() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("ostraka")]


@pytest.mark.parametrize("count", [2, 40])
def test_calls_grow_neither_with_time_nor_with_processes(count: int):
    with many_members(count) as members:
        meeting = threading.Barrier(count)
        for duration_s in (0.0, 0.5):
            saves = on_all(members, lambda m, s=duration_s: save(m, meeting.wait, s))
            calls = [times.calls.total() for times in saves]
            # One process completes each stage, and one is the last to leave.
            assert sum(calls) == 11 + 8 * (count - 1) + 3
            assert max(calls[1:]) <= 8 + 3
            assert calls[0] <= 11 + 3


def test_all_get_what_process_0_decides_and_keys_of_old_operations_are_deleted():
    with many_members(3) as members:
        for is_last in (True, False):
            assert on_all(members, partial(sum_up, is_last=is_last)) == [3] * 3
            assert listeners() == []
        for _ in range(58):
            on_all(members, sum_up)
        left = members[0].client.key_value_dir_get("ostraka/")
        numbers = {int(key.split("/")[1]) for key, _ in left}
        assert max(numbers) == 60
        assert len(numbers) <= 40  # Those that one was late to leave are deleted later.
        # An operation that one has not left keeps its keys.
        late = Operation("late", member=members[2])
        on_all(members[:2], lambda m: caught(lambda: fail_alone(m)))
        for _ in range(40):
            on_all(members, sum_up)
        with pytest.raises(ProcessFailed, match="process [01]: ValueError: of its own"), late:
            late.exchange("never", None, sum)


def fail_alone(member: Member) -> None:
    with Operation("doomed", member=member):
        raise ValueError("of its own")


def check_for_ever(operation: Operation) -> None:
    while True:
        operation.check()
        time.sleep(0.01)


def fail_at_work(member: Member, failing: int) -> None:
    with Operation("work", member=member) as operation:
        operation.exchange("begin", None, len)
        if member.process == failing:
            raise ValueError("of its own")
        check_for_ever(operation)


def raise_own_error(member: Member, own_errors: bool = True) -> None:
    with Operation("work", member=member, own_errors=own_errors) as operation:
        if member.process == 1:
            raise Busy("in use")
        operation.exchange("begin", None, len)


def refuse_to_decide(member: Member) -> None:
    def refuse(payloads: list[Any]) -> Any:
        raise ValueError(f"not with {payloads}")

    with Operation("work", member=member) as operation:
        operation.exchange("begin", member.process, refuse)


def give_up_from_a_thread(member: Member) -> None:
    with Operation("work", member=member) as operation:
        operation.exchange("begin", None, len)
        if member.process == 1:
            thread = threading.Thread(target=operation.give_up, args=("it was told to",))
            thread.start()
            thread.join()
        else:
            operation.exchange("commit", None, len, is_last=True)
        check_for_ever(operation)


OWN = "ProcessFailed: process 1: in use"
FAILURES: dict[str, tuple[Callable[[Member], None], list[str]]] = {
    **{
        f"{n} at work": (
            partial(fail_at_work, failing=n),
            [f"ProcessFailed: process {n}: ValueError: of its own"] * 3,
        )
        for n in (0, 2)
    },
    "own errors stay what they are": (raise_own_error, [OWN, "Busy: in use", OWN]),
    "unless they need not": (partial(raise_own_error, own_errors=False), [OWN] * 3),
    "deciding": (
        refuse_to_decide,
        ["ProcessFailed: process 0: ValueError: not with [0, 1, 2]"] * 3,
    ),
    "giving up from another thread": (
        give_up_from_a_thread,
        ["ProcessFailed: process 1: it was told to"] * 3,
    ),
}


def test_all_hear_of_a_failure():
    with many_members(3) as members:
        for name, (work, expected) in FAILURES.items():
            said = on_all(members, lambda m, work=work: caught(lambda: work(m)))
            assert said == expected, name
            assert on_all(members, sum_up) == [3] * 3, name
            assert listeners() == [], name


def test_nothing_contradicts_the_last_stage_once_all_have_posted():
    operations: dict[int, Operation] = {}

    def work(member: Member, giving_up: int) -> int:
        def give_up_and_count(payloads: list[Any]) -> int:
            operations[giving_up].give_up("too late")
            return len(payloads)

        with Operation("work", member=member) as operation:
            operations[member.process] = operation
            operation.exchange("begin", None, len)
            return operation.exchange("commit", None, give_up_and_count, is_last=True)

    with many_members(3) as members:
        for giving_up in (0, 1):
            assert on_all(members, partial(work, giving_up=giving_up)) == [3] * 3


class Interrupted:
    """A client of process 0 that Ctrl-C interrupts just after it has published a word."""

    def __init__(self, client: Any, word: int):
        self._client = client
        self._key = f"/word/{word}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self._client.key_value_set(key, value, allow_overwrite)
        if key.endswith(self._key):
            self._key = "never again"
            raise KeyboardInterrupt


def three_stages(member: Member) -> list[int]:
    with Operation("work", member=member) as operation:
        return [operation.exchange(str(stage), None, len) for stage in range(3)]


def test_an_interrupt_between_two_words_of_process_0_leaves_no_gap():
    with many_members(3) as members:
        interrupted: Any = Interrupted(members[0].client, 1)
        members[0].client = interrupted
        said = on_all(members, lambda m: caught(lambda: three_stages(m)))
    assert said[0].startswith("KeyboardInterrupt")
    assert said[1:] == ["ProcessFailed: process 0: KeyboardInterrupt: "] * 2


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Whoever runs the tests in the background has them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_ends_the_wait_for_an_answer():
    def work(member: Member) -> None:
        with Operation("work", member=member) as operation:
            if member.process == 0:
                operation._keys.wait_for("begin/post/1")
                os.kill(os.getpid(), signal.SIGINT)
                check_for_ever(operation)
            operation.exchange("begin", None, len)

    with many_members(2) as members, ThreadPoolExecutor(1) as pool:
        process_0 = pool.submit(lambda: caught(lambda: work(members[0])))
        # In the main thread, which signals interrupt.
        assert caught(lambda: work(members[1])) == "KeyboardInterrupt: "
        assert process_0.result() == "ProcessFailed: process 1: KeyboardInterrupt: "


# The roll


def call_often(monkeypatch: pytest.MonkeyPatch, dead_after_s: float) -> None:
    monkeypatch.setattr(_coordinate, "DEAD_AFTER_S", dead_after_s)
    monkeypatch.setattr(_coordinate, "_ROLL_CALLS", 10 * dead_after_s)
    monkeypatch.setattr(_coordinate, "_LOOK_EVERY_S", 0.02)


def test_one_that_answers_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    call_often(monkeypatch, 60.0)

    def work(member: Member) -> int:
        client: Any = member.client
        with Operation("work", member=member) as operation:
            operation.exchange("begin", None, len)
            if member.process == 2:
                before = client.calls["key_value_set"]
                while client.calls["key_value_set"] < before + 3:
                    time.sleep(0.01)
            return operation.exchange("commit", None, len, is_last=True)

    with many_members(4) as members:
        assert on_all(members, work) == [4] * 4
        clients: list[Any] = [member.client for member in members]
        answers = [client.calls["key_value_set"] for client in clients]
    assert answers[2] >= 6
    assert max(answers[1], answers[3]) <= 6  # whoever has posted does not answer


def abandon(member: Member, stages: int) -> None:
    """Leave the keys of one that came to an operation, posted to some stages, and was killed."""
    keys = member.begin_operation()
    keys.set(f"here/{member.process}", -1)
    for stage in range(stages):
        keys.set(f"{stage}/post/{member.process}", None)
        keys.count_up(f"{stage}/count")


@pytest.mark.parametrize("stages", [0, 1])
def test_one_that_does_not_answer_is_named(stages: int, monkeypatch: pytest.MonkeyPatch):
    call_often(monkeypatch, 1.0)
    with many_members(4) as members:
        abandon(members[3], stages)
        said = on_all(members[:3], lambda m: caught(lambda: three_stages(m)))
    assert len(set(said)) == 1
    assert said[0].startswith("ProcessFailed: process 3: it has not been heard of for 1 s; it was")


def test_one_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_coordinate, "ARRIVE_WITHIN_S", 0.5)
    with many_members(3) as members:
        said = on_all(members[:2], lambda m: caught(lambda: three_stages(m)))
        assert said == ["ProcessFailed: process 2: it did not come to the work in 0.5 s"] * 2
        # Whoever comes later finds how it ended.
        assert on_all(members[2:], lambda m: caught(lambda: three_stages(m))) == said[:1]


def test_a_stage_that_nobody_completes_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """The last to post was killed before it could tell process 0."""
    call_often(monkeypatch, 60.0)
    posted = threading.Event()

    def work(member: Member) -> int:
        with Operation("work", member=member) as operation:
            if member.process == 0:
                posted.wait()
            return operation.exchange("0", None, len, is_last=True)

    real = Keys.count_up

    def count_up(keys: Keys, key: str) -> int:
        number = real(keys, key)
        if key == "0/count":
            posted.set()
            return 0  # nobody takes itself for the last
        return number

    monkeypatch.setattr(Keys, "count_up", count_up)
    with many_members(3) as members:
        assert on_all(members, work) == [3] * 3


def test_the_table_takes_the_place_of_the_old_one():
    calls = {"process_0": 12, "least": 8, "most": 9}
    row = {"processes": 1024, "agree_s": [0.5, 0.7, 0.6], "commit_s": [0.25]}
    table = make_table([{**row, "calls_short": calls, "calls_long": calls}])
    assert "| 1,024 | 0.600 s | 0.250 s | 12 | 8 to 9 | 12; 8 to 9 |" in table
    text = f"before\n{TABLE_BEGINS}old\n{TABLE_ENDS}after\n"
    assert with_table(text, table) == f"before\n{TABLE_BEGINS}{table}{TABLE_ENDS}after\n"
