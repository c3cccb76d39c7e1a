"""Loggers of a manager. They receive an entry for every save and restore."""

from __future__ import annotations

import abc
import logging
from dataclasses import dataclass
from typing import Any

from ostraka.compat.orbax._names import absent

step_statistics: Any
"""This module, as Orbax names a part of it."""
_log = logging.getLogger("ostraka")


class AbstractLogger(abc.ABC):
    """Receives entries: dicts of `SaveStepStatistics` or `RestoreStepStatistics`."""

    @abc.abstractmethod
    def log_entry(self, entry: Any) -> None: ...


class StandardLogger(AbstractLogger):
    """Writes entries to Python's log."""

    def log_entry(self, entry: Any) -> None:
        _log.info("%s", entry)


class CompositeLogger(AbstractLogger):
    """Passes entries to several loggers."""

    def __init__(self, *loggers: AbstractLogger):
        self._loggers = loggers

    def log_entry(self, entry: Any) -> None:
        for logger in self._loggers:
            logger.log_entry(entry)


_OWN_LOGGER = "subclass logging.AbstractLogger, and send its entries"
CloudLogger = absent("logging.CloudLogger", _OWN_LOGGER)
CloudLoggerOptions = absent("logging.CloudLoggerOptions", _OWN_LOGGER)


# step_statistics: fields that are not measured are None


@dataclass
class SaveStepStatistics:
    step: int | None = None
    event_type: str | None = "save"
    directory: str | None = None
    reached_preemption: bool | None = False
    preemption_received_at: float | None = None
    synchronous: bool | None = False
    wait_for_prev_start_time: float | None = None
    wait_for_prev_duration_secs: float | None = None
    time_between_consecutive_saves_sec: float | None = None
    checkpointer_blocking_start_time: float | None = None
    checkpointer_blocking_duration_secs: float | None = None
    get_old_steps_start_time: float | None = None
    get_old_steps_duration_secs: float | None = None
    checkpoint_manager_blocking_start_time: float | None = None
    checkpoint_manager_blocking_duration_secs: float | None = None


@dataclass
class RestoreStepStatistics:
    step: int | None = None
    event_type: str | None = "restore"
    directory: str | None = None
    checkpointer_start_time: float | None = None
    checkpointer_duration_secs: float | None = None
    checkpoint_manager_start_time: float | None = None
    checkpoint_manager_duration_secs: float | None = None
