"""Agree, report and commit across processes, on JAX's own coordination service.

With one process every stage happens at once, without messages.

An operation goes through stages. In each stage every process posts its payload and then waits. The
process that posts last tells process 0. Process 0 lists all posts once, decides, and publishes its
answer. A process that fails reports its failure to process 0. Process 0 publishes it at once,
instead of an answer. One thread for each operation waits, by blocking gets, so that
the main thread can be interrupted. So the number of calls depends on the number of stages, not on
their duration or on the number of processes.

While process 0 waits, it looks for processes whose connection to it has closed
(`processes._presence`). They have ended, perhaps long before, and are named at once. That takes no
message.

There is one exception. While process 0 has posted and waits for others, it calls the roll every few
seconds, and those still at work answer. A process that does not answer for `DEAD_AFTER_S` hangs, or
its host is gone. It is named, too. JAX's own heartbeats would be too slow: they come every 50 s,
and once they are missing JAX ends all processes.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Self

from ostraka.errors import OstrakaError, describe
from ostraka.processes.service import ALONE, Member, this_member

DEAD_AFTER_S = 30.0
"""A process that does not answer process 0 for this long is considered dead."""
ARRIVE_WITHIN_S = 600.0
"""How long the others wait for a process that has not begun the operation at all."""

_ROLL_CALLS = 10
"""The number of roll calls within `DEAD_AFTER_S`."""
_LOOK_EVERY_S = 0.2
"""How often process 0 looks at its clock while it waits. This makes no call."""
_VERDICT_WITHIN_S = 5.0
_NAMED = 8
"""How many processes are named one by one."""


class ProcessFailed(Exception):
    """Some process can't go on, so no process can."""

    def __init__(self, process: int, reason: str):
        self.process = process
        self.reason = reason
        super().__init__(f"process {process}: {reason}")


def name_processes(numbers: Sequence[int]) -> str:
    """Return 'process 3', 'processes 0, 1', or the first of many."""
    few = ", ".join(map(str, numbers[:_NAMED]))
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"{'process' if len(numbers) == 1 else 'processes'} {few}{more}"


def refuse_different_paths(verb: str, paths: Sequence[str]) -> None:
    """Raise ProcessFailed, with the path of every process, unless all have the same."""
    if len(set(paths)) == 1:
        return
    odd = next(process for process, path in enumerate(paths) if path != paths[0])
    listed = "; ".join(
        f"{name_processes([p for p, other in enumerate(paths) if other == path])}: {path}"
        for path in dict.fromkeys(paths)
    )
    text = f"it {verb} {paths[odd]} while process 0 {verb} {paths[0]}"
    raise ProcessFailed(odd, f"{text}; give all processes the same path ({listed})")


class Operation:
    """One save or restore that all processes do together. Use as a context manager.

    An exception inside becomes ProcessFailed on every process. With `own_errors` a process that
    raised an OstrakaError raises just that. Every process must enter it, in the same order among
    operations, before anything that may fail on one process alone. `member` is for measurements
    with many members in one process.
    """

    def __init__(
        self,
        name: str,
        *,
        alone: bool = False,
        own_errors: bool = False,
        member: Member | None = None,
    ):
        if member is None and not alone:
            import jax  # A process that is alone may do without it.

            alone = jax.process_count() == 1
        self._member = member or (ALONE if alone else this_member())
        self.process = self._member.process
        self.count = self._member.count
        self._name = name
        self._own_errors = own_errors
        if self.count > 1:
            self._keys = self._member.begin_operation()
        self._verdict: ProcessFailed | None = None
        self._is_closed = False
        self._listener: threading.Thread | None = None
        self._heard: SimpleQueue[Any] = SimpleQueue()
        """From the listener: answers, a failure, or on process 0 None for a complete stage."""
        self._stage = 0
        """The stage that comes next, as far as the listener knows."""
        self._posts = 0
        """The number of stages that this process has posted to."""
        self._is_last = False
        """True if this process has come to the last stage."""
        self._is_decided = False
        """On process 0: True if the last stage has its answer."""
        self._told = 0
        """On process 0: the number of words that it has published."""
        self._telling = threading.Lock()

    def __enter__(self) -> Self:
        if self.count == 1:
            return self
        try:
            if self.process == 0:
                self._open_door()
                self._member.forget_old()
            else:
                self._keys.set(f"here/{self.process}", -1)
            self._start_listening()
        except BaseException:
            # The others have to hear of it, and nobody else will tell them.
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._is_closed or self.count == 1:
            return
        failure = None
        if error is not None and not isinstance(error, ProcessFailed):
            failure = self._report(error)
        self._is_closed = True
        with suppress(Exception):  # The service may have gone: not in the place of the error.
            self._leave()
        keep = self._own_errors and isinstance(error, OstrakaError)
        if failure is not None and isinstance(error, Exception) and not keep:
            raise failure from error

    def _report(self, error: BaseException) -> ProcessFailed:
        """Tell the others. Return the verdict, which may be an earlier error of another process."""
        mine = ProcessFailed(self.process, describe(error))
        if self._verdict is None:
            with suppress(Exception):  # The service may have gone: not in the place of the error.
                if self.process == 0:
                    self._fail(mine)
                else:
                    self._take_turn("failed", mine.process, mine.reason)
                    self._join()
        return self._verdict or mine

    def _leave(self) -> None:
        if self.process == 0 and not self._is_decided:
            self._take_turn("over")  # for the listener
            self._join()
            if self._verdict is None:
                self._tell("over")
        self._join()
        if self.process == 0:
            self._member.ended.append(self._keys.prefix)
        self._keys.leave(self.count)

    def exchange(
        self,
        stage: str,
        payload: Any,
        decide: Callable[[list[Any]], Any],
        *,
        timeout_s: float | None = None,
        is_last: bool = False,
    ) -> Any:
        """Send `payload` (JSON) to process 0, and return its answer to the payloads of all.

        `decide` returns that answer. It runs on process 0 only. Raises ProcessFailed on every
        process if any process failed or `decide` raised. On process 0 the error of `decide` is the
        cause. The answer of the last stage holds for all, even if a process fails before it has
        received it.
        """
        self.check()
        if self.count == 1:
            return decide([payload])
        self._is_last = is_last
        self._posts += 1
        self._keys.set(f"{stage}/post/{self.process}", payload)
        if self._keys.count_up(f"{stage}/count") == self.count:
            self._complete_stage()
        if self.process == 0:
            payloads = self._collect(stage, ARRIVE_WITHIN_S if timeout_s is None else timeout_s)
            return self._decide(payloads, decide)
        return self._await_answer(stage)

    def give_up(self, reason: str) -> None:
        """From any thread: make this operation fail on all processes, unless it is decided."""
        if self.count == 1:
            self._verdict = self._verdict or ProcessFailed(self.process, reason)
        else:
            self._take_turn("failed", self.process, reason)

    def check(self) -> None:
        """Raise ProcessFailed if this operation has failed on any process."""
        if self._verdict is not None:
            raise self._verdict

    def wait_until_left(self) -> None:
        """On process 0: wait a little after the end until the others have left it as well."""
        if self.count > 1:
            with suppress(Exception):  # One may never leave, or the service itself have failed.
                self._keys.have_all_left(_VERDICT_WITHIN_S)

    # Every process

    def _complete_stage(self) -> None:
        # If it has failed already, then that holds.
        self._keys.create(f"turn/{self._posts - 1}", ["complete"])

    def _take_turn(self, *word: Any) -> None:
        """Tell process 0. Each stage has one turn. If that is taken, this is about the next stage.

        The first word holds, so a complete stage can't fail.
        """
        stage = self._stage
        while not self._keys.create(f"turn/{stage}", word):
            stage += 1

    def _start_listening(self) -> None:
        self._listener = threading.Thread(target=self._listen, name="ostraka_listen", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        try:
            if self.process == 0:
                self._hear_turns()
            else:
                self._hear_words()
        except Exception as error:
            # What the service's client says further down is about itself.
            said = (str(error).splitlines() or [""])[0]
            reason = f"the coordination service can't be reached ({type(error).__name__}: {said})"
            self._verdict = self._verdict or ProcessFailed(self.process, reason)
            self._heard.put(self._verdict)

    def _join(self) -> None:
        """Wait a little, once, for the listener, which ends with the operation.

        Process 0 may be busy while this process was interrupted.
        """
        listener, self._listener = self._listener, None
        if listener is not None and listener.ident is not None:
            listener.join(_VERDICT_WITHIN_S)

    # Every process but 0

    def _await_answer(self, stage: str) -> Any:
        # Process 0 is always there: the service lives in it, and JAX ends all others when it dies.
        heard = self._heard.get()
        if isinstance(heard, ProcessFailed):
            raise heard
        return heard

    def _hear_words(self) -> None:
        """Receive the words that process 0 publishes, until the last one."""
        for number in itertools.count():
            kind, *said = self._keys.wait_for(f"word/{number}")
            if kind == "roll_call":
                if self._posts == self._stage:  # It waits only for those that have not posted.
                    self._keys.set(f"here/{self.process}", number)
            elif kind == "door":
                if self._member.connections is not None:
                    self._member.connections.connect(said[0], self.process)
            elif kind == "answer":
                answer, is_last = said
                self._stage += 1
                self._heard.put(answer)
                if is_last:
                    return
            elif kind == "failed":
                self._verdict = ProcessFailed(*said)
                self._heard.put(self._verdict)
                return
            else:
                self._heard.put(ProcessFailed(0, f"it has left the {self._name}"))
                return

    # Process 0

    def _open_door(self) -> None:
        """Let the others connect to this process, once for all operations."""
        connections = self._member.connections
        if connections is None:
            return
        if not connections.is_told:
            address = connections.open()
            if address is not None:
                self._tell("door", address)
            connections.is_told = True
        connections.find_ended()  # takes in those that wait to be

    def _hear_turns(self) -> None:
        """Receive what happens to each stage: it is complete, or a process has failed."""
        while True:
            kind, *said = self._keys.wait_for(f"turn/{self._stage}")
            self._stage += 1
            if kind == "failed":
                self._fail(ProcessFailed(*said))
                self._heard.put(self._verdict)
            if kind != "complete":
                return
            is_last = self._is_last  # before the main thread goes on
            self._heard.put(None)
            if is_last:
                return

    def _tell(self, *word: Any) -> None:
        """Publish a word. Raises ProcessFailed if the operation has failed."""
        with self._telling:
            self.check()
            # Counted after it is there: an interrupt in between must not leave a gap, which the
            # others would wait at for ever.
            while not self._keys.create(f"word/{self._told}", word):
                self._told += 1
            self._told += 1
            if word[0] == "failed":
                self._verdict = ProcessFailed(*word[1:])

    def _fail(self, failure: ProcessFailed) -> None:
        """Publish the failure of the operation, unless all know of one."""
        with suppress(ProcessFailed):
            self._tell("failed", failure.process, failure.reason)

    def _decide(self, payloads: list[Any], decide: Callable[[list[Any]], Any]) -> Any:
        self.check()
        try:
            answer = decide(payloads)
        except ProcessFailed as failure:
            self._fail(failure)
            raise
        except Exception as error:
            failure = ProcessFailed(0, describe(error))
            self._fail(failure)
            raise failure from error
        self._tell("answer", answer, self._is_last)
        self._is_decided = self._is_last
        return answer

    def _collect(self, stage: str, limit_s: float) -> list[Any]:
        """Return all posts, once they exist. Meanwhile, find processes that died or do not come."""
        roll = _Roll(limit_s)
        while True:
            begin_s = time.monotonic()
            try:
                failure = self._heard.get(timeout=_LOOK_EVERY_S)
            except Empty:
                # While the whole machine stood still nobody could answer: that does not count.
                roll.waited_s += min(time.monotonic() - begin_s, 5 * _LOOK_EVERY_S)
                self._look_for_ended(stage, roll)
                if roll.is_due():
                    self._call_roll(stage, roll)
                continue
            if failure is not None:
                raise failure
            posts = self._keys.by_process(f"{stage}/post")
            return [posts[process] for process in range(self.count)]

    def _look_for_ended(self, stage: str, roll: _Roll) -> None:
        connections = self._member.connections
        ended = set[int]() if connections is None else connections.find_ended() - roll.ended
        if not ended:
            return
        roll.ended |= ended  # What one has not posted by now it never will: ask once.
        missing = ended - self._keys.by_process(f"{stage}/post").keys()
        if missing:
            reason = f"it has ended, or was killed, before it came to the end of the {self._name}"
            self._take_turn("failed", min(missing), reason)

    def _call_roll(self, stage: str, roll: _Roll) -> None:
        posted = self._keys.by_process(f"{stage}/post").keys()
        missing = set(range(self.count)) - posted
        if not missing:
            self._complete_stage()  # The process that was to do it has died.
            return
        answers = self._keys.by_process("here")
        failure = roll.first_failure(missing, answers, self._name)
        if failure is not None:
            self._take_turn("failed", failure.process, failure.reason)
        elif missing & answers.keys():
            with suppress(ProcessFailed):  # The listener passes it on.
                self._tell("roll_call")


class _Roll:
    """On process 0: how long it has waited, and when it last heard of each process."""

    def __init__(self, limit_s: float):
        self.waited_s = 0.0
        self.ended: set[int] = set()
        """Processes that have ended."""
        self._limit_s = limit_s
        self._called_s = 0.0
        self._heard: dict[int, tuple[int, float]] = {}
        """The latest answer of each process, and when it was first seen."""

    def is_due(self) -> bool:
        return self.waited_s >= self._called_s + min(DEAD_AFTER_S / _ROLL_CALLS, self._limit_s)

    def first_failure(
        self, missing: set[int], answers: dict[int, int], name: str
    ) -> ProcessFailed | None:
        """Return the failure of a missing process that has not come in time or does not answer."""
        self._called_s = self.waited_s
        for process in sorted(missing):
            if process not in answers:
                if self.waited_s >= self._limit_s:
                    reason = f"it did not come to the {name} in {self._limit_s:g} s"
                    return ProcessFailed(process, reason)
                continue
            if self._heard.get(process, (None, 0.0))[0] != answers[process]:
                self._heard[process] = (answers[process], self.waited_s)
            elif self.waited_s - self._heard[process][1] >= DEAD_AFTER_S:
                return ProcessFailed(
                    process,
                    f"it has not been heard of for {DEAD_AFTER_S:g} s; it was killed, or its host "
                    "is gone",
                )
        return None
