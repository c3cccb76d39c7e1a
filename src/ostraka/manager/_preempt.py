"""Preemption: SIGTERM, and the step at which all processes save because of it.

The first SIGTERM to a process is noted, the second ends the program. The signal may have had a
handler before. Ours calls a Python handler of the user each time, and restores it in the end. Under
`jax.distributed`, JAX has a handler in C, which Python does not know. That handler notes the first
SIGTERM and ignores all others, so a program under JAX could not be ended. Our handler takes its
place and calls it.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import math
import os
import signal
import sys
import threading
import time
import weakref
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from ostraka.common.record import logger as log
from ostraka.errors import Preempted

_questions = itertools.count(1)
_preempted: list[bool] = []
"""Not empty once JAX has reported a preemption, which it does only once."""
SAME_NOTICE_S = 1.0
"""SIGTERMs within this time count as one: `timeout` signals a process, and then its group."""
_LEAVE_WITHIN_S = 5.0
"""How long JAX may wait for other processes at the end of the program."""


class Preemption:
    """Decides at which step a run saves because of its preemption.

    Under `jax.distributed`, JAX gets the notice (SIGTERM on any process) and picks a sync point
    ahead of all processes. Each question is a sync point, so all processes must ask equally often.
    Without it the notice is SIGTERM to this process.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._answer = False
        self._is_saved = False
        self._by_jax = jax.distributed.is_initialized() and _ask_jax() is not None
        self._sigterm: Sigterm | None = None
        if self._by_jax or jax.process_count() == 1:
            self._sigterm = Sigterm(by_jax=self._by_jax)

    def reached(self, step: int) -> bool:
        """Return True from the step on at which to save. The answer for a step does not change."""
        if step != self._step and not self._answer:
            self._step = step
            by_signal = self._sigterm is not None and self._sigterm.count > 0
            self._answer = bool(_ask_jax()) if self._by_jax else by_signal
        return self._answer

    def is_due(self, step: int) -> bool:
        """Return True for the step to save because of preemption, until it is saved."""
        return self.reached(step) and not self._is_saved

    def note_save(self) -> None:
        """Note that the due step is on disk, on all processes."""
        self._is_saved = True

    def end(self, message: str) -> Preempted:
        """Return the exception that all processes raise to end the program."""
        return Preempted(message) if self._sigterm is None else self._sigterm.end(message)

    @property
    def watches_sigterm(self) -> bool:
        """True if SIGTERM to this process is noted, and does not end it."""
        return self._sigterm is not None and self._sigterm.watches

    def stop(self) -> None:
        """Watch SIGTERM no longer."""
        if self._sigterm is not None:
            self._sigterm.stop()

    def unanswered(self) -> Preempted | None:
        """After `stop`: return what to raise if SIGTERM came and the program does not know.

        None if the program has a handler of its own, or if another manager will tell it.
        """
        sigterm = self._sigterm
        if sigterm is None or self._answer or not sigterm.is_swallowed:
            return None
        if any(other.watches and other.count and other is not sigterm for other in _catching):
            return None
        return sigterm.end("SIGTERM came after the last save", alone=True)


def _ask_jax() -> bool | None:
    """Return True if JAX's sync point is reached, None if JAX does not watch for preemption."""
    try:
        if not _preempted and multihost_utils.reached_preemption_sync_point(next(_questions)):
            _preempted.append(True)
    except RuntimeError:
        if jax.process_count() > 1:
            log.warning(
                "preemption is not watched: JAX's preemption service is off "
                "(jax_enable_preemption_service)"
            )
        return None
    return bool(_preempted)


# SIGTERM in this process


class Sigterm:
    """Watches SIGTERM for one manager, until `stop`. To be made in the main thread.

    The second SIGTERM raises Preempted in the main thread, wherever that is. `with` and `finally`
    blocks wait for the running save. The third has the default action, at once.
    """

    def __init__(self, *, by_jax: bool) -> None:
        # Plain attributes: with a lock, a second signal could interrupt its holder and deadlock.
        self.count = 0
        self._counted_s = -math.inf
        self._by_jax = by_jax
        self._before: Any = signal.SIG_DFL
        self._relay: _Relay | None = None
        self.watches = False
        self._is_ending = False
        if threading.current_thread() is threading.main_thread():
            self._catch()
        elif not by_jax:
            log.warning("SIGTERM is not watched: a Manager can do so only in the main thread")

    @property
    def is_swallowed(self) -> bool:
        """True if SIGTERM came, and the program neither ignores it nor has a handler for it."""
        handler = self._next_handler()
        return self.count > 0 and handler != signal.SIG_IGN and not callable(handler)

    def end(self, message: str, *, alone: bool = False) -> Preempted:
        """Return the exception that ends the program. From now on SIGTERM just ends it.

        With `alone` other processes may go on, and JAX would wait for them for minutes.
        """
        self._is_ending = True
        if alone and self._by_jax:
            _ending_alone.append(True)
        return Preempted(message)

    def stop(self, *, in_child: bool = False) -> None:
        """Restore the handler that SIGTERM had before."""
        if not self.watches:
            return
        self.watches = False
        # Only the main thread may set handlers. From another, ours stays and passes signals on.
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) == self._on_signal:
            handler = self._next_handler()
            if isinstance(handler, _NativeHandler):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                if not (in_child or self._is_ending):  # It would ignore the signal.
                    handler.restore()
            else:
                signal.signal(signal.SIGTERM, handler)
        if in_main and self._relay is not None:
            self._relay.close(in_child=in_child)

    def _next_handler(self) -> Any:
        """Return the handler to call after this one. Managers may be closed in any order."""
        before = self._before
        owner = getattr(before, "__self__", None)
        if isinstance(owner, Sigterm) and not owner.watches:
            return owner._next_handler()
        return before

    def _catch(self) -> None:
        native = _native_handler() if self._by_jax else None
        if self._by_jax and native is None:
            return
        before = signal.signal(signal.SIGTERM, self._on_signal)
        self._before = signal.SIG_DFL if before is None else before  # None: not set by Python
        after = _native_handler() if native else None
        if native is not None and after is not None and native.address != after.address:
            self._before = native
            self._relay = _start_relay(native)
        elif self._by_jax and not isinstance(getattr(before, "__self__", None), Sigterm):
            # The program has replaced JAX's handler by one of its own, and so has the last word.
            signal.signal(signal.SIGTERM, before)
            return
        self.watches = True
        _catching.add(self)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        is_new = self.watches and now_s - self._counted_s >= SAME_NOTICE_S
        if is_new:
            self.count += 1
            self._counted_s = now_s
        if is_new and self.count > 2:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            os._exit(Preempted.code)  # the first process of a container, which the kernel spares
        handler = self._next_handler()
        if isinstance(handler, _NativeHandler):
            handler.call(number)
        elif callable(handler):
            handler(number, frame)
        elif not self.watches:
            signal.signal(number, handler)
            signal.raise_signal(number)
        if is_new and self.count == 2:
            raise self.end("SIGTERM came a second time", alone=True)


class Interrupt:
    """Turns the first Ctrl-C into a SIGTERM of this process, until `stop`.

    So all processes agree on a step to save, as on preemption. The second Ctrl-C interrupts the
    program, wherever it is. To be made in the main thread, after `Preemption`.
    """

    def __init__(self, preemption: Preemption) -> None:
        self.came = False
        self._before: Any = signal.getsignal(signal.SIGINT)
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and preemption.watches_sigterm and callable(self._before):
            signal.signal(signal.SIGINT, self._on_signal)
        else:
            log.warning(
                'on_interrupt="save" has no effect: the Manager was not made in the main thread, '
                "SIGTERM is not watched, or the program ignores Ctrl-C"
            )

    def stop(self) -> None:
        """Restore the handler that Ctrl-C had before."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) == self._on_signal:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop()
        self.came = True
        log.warning("interrupted: the next save is the last one; press Ctrl-C again to end at once")
        signal.raise_signal(signal.SIGTERM)


# The handler that JAX has


class _Action(ctypes.Structure):
    """`struct sigaction` of Linux, with glibc and with musl."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_SA_SIGINFO = 4


class _NativeHandler:
    """The handler of SIGTERM that a library has set in C."""

    def __init__(self, action: _Action, address: int):
        self._action = action
        self.address = address
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_int)(address)

    def call(self, number: int) -> None:
        self._function(number)

    def restore(self) -> None:
        ctypes.CDLL(None).sigaction(signal.SIGTERM, ctypes.byref(self._action), None)


def _native_handler() -> _NativeHandler | None:
    """Return the present handler, if it takes just the number of the signal, or else None."""
    if sys.platform != "linux":
        return None
    action = _Action()
    if ctypes.CDLL(None).sigaction(signal.SIGTERM, None, ctypes.byref(action)) != 0:
        return None
    address: int | None = action.handler
    if address is None or address <= signal.SIG_IGN or action.flags & _SA_SIGINFO:
        return None
    return _NativeHandler(action, address)


class _Relay:
    """Calls JAX's handler at once, even while the main thread is inside a long step.

    Python calls its handlers between two lines of the main thread. JAX needs a second to agree on a
    step, so after a late notice the processes would train one more.
    """

    def __init__(self, read: int, write: int):
        self._read = read
        self._write = write

    def run(self, native: _NativeHandler) -> None:
        while numbers := os.read(self._read, 64):
            if signal.SIGTERM in numbers:
                native.call(signal.SIGTERM)
        os.close(self._read)

    def close(self, *, in_child: bool) -> None:
        others = signal.set_wakeup_fd(-1)
        if others not in (-1, self._write):
            signal.set_wakeup_fd(others)  # They may put ours back later: it stays open.
            return
        os.close(self._write)
        if in_child:  # The thread that reads from it is in the parent alone.
            os.close(self._read)


def _start_relay(native: _NativeHandler) -> _Relay | None:
    """Start a relay. Return None if another library, such as asyncio, uses the wakeup file."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    others = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if others != -1:
        signal.set_wakeup_fd(others)
        os.close(read)
        os.close(write)
        return None
    relay = _Relay(read, write)
    threading.Thread(target=relay.run, args=(native,), name="ostraka-sigterm", daemon=True).start()
    return relay


# Forks

_catching: weakref.WeakSet[Sigterm] = weakref.WeakSet()
_forking = threading.local()
"""The signal mask that a forking thread had before the fork."""


def _block_before_fork() -> None:
    """Block SIGTERM while forking. Python drops one that a child receives before `stop`."""
    if _catching:
        _forking.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_after_fork() -> None:
    blocked = getattr(_forking, "blocked", None)
    if blocked is not None:
        _forking.blocked = None
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _stop_after_fork() -> None:
    """Let SIGTERM end a child. It saves nothing, and ending a data worker must not hang."""
    for sigterm in list(_catching):
        sigterm.stop(in_child=True)
    _unblock_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_block_before_fork,
        after_in_parent=_unblock_after_fork,
        after_in_child=_stop_after_fork,
    )


# The end of the program

_ending_alone: list[bool] = []
"""Not empty once this process ends although others may go on."""


def _leave_soon() -> None:
    def leave() -> None:
        time.sleep(_LEAVE_WITHIN_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(Preempted.code)

    if _ending_alone:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(target=leave, name="ostraka-leave", daemon=True).start()


atexit.register(_leave_soon)
