"""The manager of a run's steps, over steps that Ostraka and Orbax wrote."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from ostraka.compat.orbax import checkpoint_managers as policies_lib
from ostraka.compat.orbax import checkpointers as checkpointers_lib
from ostraka.compat.orbax import handlers as handlers_lib
from ostraka.compat.orbax import options as options_lib
from ostraka.compat.orbax._engine import OpenCheckpoint, Payload, put_aside, remove, write
from ostraka.compat.orbax._files import as_path
from ostraka.compat.orbax._names import refuse
from ostraka.compat.orbax.args import Composite, adopt, is_args
from ostraka.compat.orbax.handlers import RESTORE, SAVE, CompositeCheckpointHandler, args_for
from ostraka.compat.orbax.logging import RestoreStepStatistics, SaveStepStatistics
from ostraka.compat.orbax.metadata import RootMetadata, StepMetadata, step_metadata
from ostraka.compat.orbax.multihost import reached_preemption
from ostraka.processes.decide import decide_together
from ostraka.storage import open_store

DEFAULT_ITEM_NAME = "default"
METRIC_ITEM_NAME = "metrics"
METADATA_ITEM_NAME = "metadata"
RESERVED_ITEM_NAMES = (METRIC_ITEM_NAME,)
_ROOT_METADATA = "ostraka.orbax.json"

# The same under the names that Orbax's module has for them
CheckpointInfo = policies_lib.PolicyCheckpointInfo
CheckpointManagerOptions = options_lib.CheckpointManagerOptions
_ShouldSaveFnPolicy = policies_lib.ShouldSaveFnPolicy
PyTree = Any
CheckpointHandlersDict = CheckpointersDict = SaveParams = RestoreParams = dict[str, Any]

__getattr__ = refuse(__name__, checkpointers_lib, handlers_lib, options_lib)
_log = logging.getLogger("ostraka")


def is_async_checkpointer(checkpointer: Any) -> bool:
    return isinstance(checkpointer, checkpointers_lib.AsyncCheckpointer)


class StepAlreadyExistsError(ValueError):
    """A step that exists was saved with `force`."""


class AbstractCheckpointManager:
    """The base class of managers. Each method raises NotImplementedError."""

    def _missing(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not do this")

    all_steps = latest_step = best_step = reload = metrics = metadata = item_metadata = _missing
    should_save = reached_preemption = save = restore = delete = close = _missing
    wait_until_finished = check_for_errors = is_saving_in_progress = _missing

    @property
    def directory(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no directory")


class RunSteps(checkpointers_lib.BackgroundSaves):
    """The steps of a run below one directory. Steps that Orbax wrote are managed too."""

    def __init__(self, directory: Any, options: CheckpointManagerOptions, metadata: Any):
        self._options = options
        self._multiprocessing_options = options.multiprocessing_options
        """Read by subclasses, as in Orbax."""
        self._directory = as_path(directory)
        self._naming, self._when, self._keep = options.naming(), options.when(), options.keep()
        self._names: dict[int, str] = {}
        """The directory name of each step."""
        self._before: list[CheckpointInfo] | None = None
        """The committed steps before the save that is running. None if none is."""
        if options.create and not options.read_only:
            open_store(directory).prepare()
        self._root_metadata = self._keep_root_metadata(dict(metadata or {}))
        self._checkpoints: list[CheckpointInfo] = self._load_checkpoint_infos()
        """The steps, ascending, with the one that is being saved. Subclasses read it."""

    # Looking

    @property
    def directory(self) -> Any:
        return self._directory

    def all_steps(self, read: bool = False) -> list[int]:
        """Return the steps, ascending, with the one being saved. `read` looks at the disk again."""
        if read:
            self.reload()
        self._forget_failed()
        return [info.step for info in self._checkpoints]

    def latest_step(self) -> int | None:
        return max(self.all_steps(), default=None)

    def reload(self) -> None:
        """Look at the disk again."""
        self.wait_until_finished()
        self._checkpoints = self._load_checkpoint_infos()

    def metrics(self, step: int) -> Any:
        self._forget_failed()
        return next((info.metrics for info in self._checkpoints if info.step == step), None)

    def root_metadata(self) -> RootMetadata:
        return RootMetadata(custom_metadata=dict(self._root_metadata))

    # Saving

    def should_save(self, step: int) -> bool:
        if self._options.read_only:
            return False
        latest = self.latest_step()
        if latest is not None and latest >= step:
            return False
        context = policies_lib.DecisionContext(
            is_saving_in_progress=self.is_saving_in_progress(),
            reached_preemption=self.reached_preemption(step),
            multiprocessing_options=self._multiprocessing_options,
        )
        now = CheckpointInfo(step, datetime.now(UTC))
        return bool(self._when.should_save(now, list(self._checkpoints), context=context))

    def reached_preemption(self, step: int) -> bool:
        return reached_preemption(step)

    def begin(
        self, step: int, items: Payload | Mapping[str, Payload], *, metrics: Any, **options: Any
    ) -> None:
        """Begin to save items that are ready, whatever the policies say.

        Takes `custom` and `max_file_bytes` of `write`.
        """
        self.wait_until_finished()
        self._before = self._checkpoints
        superfluous = self._add(CheckpointInfo(step, datetime.now(UTC), metrics))
        try:
            self._running = write(
                self.path_of(step),
                items,
                metrics=metrics,
                step=step,
                force=True,
                background=self._options.enable_async_checkpointing,
                on_commit=lambda: self._committed(step, superfluous),
                **options,
            )
        except BaseException:
            self._end_save(failed=True)
            raise
        if self._running is None:
            self._end_save(failed=False)

    def _add(self, info: CheckpointInfo) -> list[tuple[int, str]]:
        """Add a step. Return the steps, with their names, to delete once it is committed."""
        steps = sorted([*self._checkpoints, info], key=lambda known: known.step)
        self._names[info.step] = self._naming.build_name(info.step)
        context = policies_lib.PreservationContext(self._multiprocessing_options)
        votes = self._keep.should_preserve(list(steps), context=context)
        kept = [known for known, keep in zip(steps, votes, strict=True) if keep]
        self._checkpoints = kept
        return [(known.step, self._name_of(known.step)) for known in steps if known not in kept]

    def _committed(self, step: int, superfluous: list[tuple[int, str]]) -> None:
        """Delete superfluous steps, on process 0, once a step is committed."""
        self._finalize_checkpoint(step)
        for old, name in superfluous:
            try:
                self._discard(name)
            except Exception:
                _log.exception("step %d of %s can't be deleted now", old, self._directory)

    def _discard(self, name: str) -> None:
        """Delete the directory of a step, or move it to `todelete_subdir`."""
        store, aside = open_store(self._directory).at(name), self._options.todelete_subdir
        if aside is None:
            remove(store)
        else:
            put_aside(store, self._directory / aside)

    # Waiting

    def wait_until_finished(self) -> None:
        """Wait for the save in the background. Raises its error."""
        running, self._running = self._running, None
        if running is None:
            return
        options = self._options.async_options
        error = running.exception(options.timeout_secs if options else None)
        self._end_save(failed=error is not None)
        if error is not None:
            raise error

    def _forget_failed(self) -> None:
        """Forget a step whose save has failed. Waiting for the save raises its error."""
        running = self._running
        if running is not None and running.done() and self._before is not None:
            self._end_save(failed=running.exception() is not None)

    def _end_save(self, *, failed: bool) -> None:
        if failed and self._before is not None:
            self._checkpoints = self._before
        self._before = None

    # Deleting

    def delete(self, step: int) -> None:
        """Delete a step. Raises FileNotFoundError if it does not exist."""
        if self._options.read_only:
            return
        self.wait_until_finished()
        if all(info.step != step for info in self._checkpoints):
            raise FileNotFoundError(f"Requested deleting a non-existent step: {step}.")
        name = self._name_of(step)
        decide_together(f"deletion of step {step}", lambda: self._discard(name))
        self._checkpoints = [info for info in self._checkpoints if info.step != step]

    # Names of steps

    def path_of(self, step: int) -> Any:
        return self._directory / self._name_of(step)

    def _name_of(self, step: int) -> str:
        return self._names.get(step) or self._naming.build_name(step)

    def _find(self) -> dict[int, str]:
        """Return the steps on disk with their names."""
        return {found.step: found.path.name for found in self._naming.find_all(self._directory)}

    # What subclasses override and call, under Orbax's names

    def _get_write_step_directory(self, step: int, root_dir: Any) -> Any:
        return as_path(root_dir) / self._naming.build_name(step)

    def _finalize_checkpoint(self, step: int) -> None:
        """Called on process 0 once a step is committed, for subclasses to add to."""

    def _load_checkpoint_infos(self, skip_metadata_read: bool = False) -> list[Any]:
        """Return the steps that process 0 finds on disk."""

        def look() -> list[list[Any]]:
            found = self._find().items()
            steps = ((step, name, OpenCheckpoint(self._directory / name)) for step, name in found)
            return [
                [s, name, at.source.saved.writer.get("time"), at.metrics] for s, name, at in steps
            ]

        found = decide_together(f"look at {self._directory}", look)
        self._names = {step: name for step, name, _, _ in found}
        return [
            CheckpointInfo(
                step, datetime.fromisoformat(saved) if saved else datetime.now(UTC), metrics
            )
            for step, _, saved, metrics in found
        ]

    def _keep_root_metadata(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the metadata of the run. The first manager with metadata writes it."""
        store = open_store(self._directory)

        def keep() -> dict[str, Any]:
            if store.look(_ROOT_METADATA) is not None:
                return json.loads(store.get(_ROOT_METADATA))
            if given and not self._options.read_only and self._options.save_root_metadata:
                store.put(_ROOT_METADATA, json.dumps(given).encode())
            return given

        return decide_together(f"look at {self._directory}", keep)


class CheckpointManager(RunSteps, AbstractCheckpointManager):
    """The steps of a run, saved and restored by the handlers of their items."""

    def __init__(
        self,
        directory: Any,
        checkpointers: Any = None,
        options: CheckpointManagerOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
    ):
        self._logger = logger
        self._single: bool | None = None
        """True if steps have one item without a name. None if that is not known yet."""
        self._handler = self._composite(
            checkpointers, tuple(item_names or ()), item_handlers, handler_registry
        )
        super().__init__(directory, options or CheckpointManagerOptions(), metadata)

    def _composite(
        self, checkpointers: Any, names: tuple[str, ...], handlers: Any, registry: Any
    ) -> CompositeCheckpointHandler:
        """Return the handler of all items. Sets `_single` if the arguments tell."""
        if checkpointers is not None and (names or handlers is not None or registry is not None):
            raise ValueError(
                "`checkpointers` can't be given together with `item_names`, `item_handlers` or "
                "`handler_registry`."
            )
        if registry is not None and (names or handlers is not None):
            raise ValueError("`handler_registry` can't be given together with `item_handlers`.")
        if isinstance(checkpointers, Mapping):
            handlers = {k: c.handler for k, c in checkpointers.items()}
        elif checkpointers is not None:
            handlers = checkpointers.handler
        if handlers is None:
            self._single = False if names else None
            return CompositeCheckpointHandler(*names, handler_registry=registry)
        self._single = False
        if isinstance(handlers, Mapping):
            return CompositeCheckpointHandler(*names, **{str(k): h for k, h in handlers.items()})
        if isinstance(handlers, CompositeCheckpointHandler):
            return handlers
        self._single = True
        return CompositeCheckpointHandler(default=handlers)

    # Looking

    def best_step(self) -> int | None:
        """Return the best step by `best_fn`, or the latest without `best_fn`.

        Returns None if no step has metrics.
        """
        if self._options.best_fn is None:
            return self.latest_step()
        self._forget_failed()
        is_min = self._options.best_mode == "min"
        best = policies_lib.ranked(self._checkpoints, self._options.best_fn, is_min)
        return best[-1].step if best else None

    def metadata(self, step: int | None = None) -> RootMetadata | StepMetadata:
        """Return the metadata of a step, or of the run if `step` is None."""
        if step is None:
            return self.root_metadata()
        opened = self._open(step)
        return step_metadata(opened, self._describe(opened))

    def item_metadata(self, step: int | None) -> Any:
        """Return the metadata of each leaf without reading arrays: one tree, or a Composite."""
        if step is None:
            raise ValueError("`step` must be provided.")
        return self._describe(self._open(step))

    def _describe(self, opened: OpenCheckpoint) -> Any:
        described = self._handler.describe(opened)
        return described["default"] if self._is_single(opened) else described

    # Saving

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: Any = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Save a step if the policy says so, or with `force`. Return True if it saves."""
        step, began = int(step), time.time()
        given, single = self._save_args(items, save_kwargs, args)
        if self._options.read_only or (not force and not self.should_save(step)):
            return False
        self.wait_until_finished()
        self._single = single
        if any(info.step == step for info in self._checkpoints):
            raise StepAlreadyExistsError(f"Checkpoint for step {step} already exists.")
        background = self._options.enable_async_checkpointing
        payloads = self._handler.payload(given, background=background)
        self.begin(
            step,
            payloads["default"] if single and list(payloads) == ["default"] else payloads,
            metrics=metrics,
            custom=custom_metadata,
            max_file_bytes=handlers_lib.file_size_of(given),
        )
        self._log_entry(
            SaveStepStatistics(
                step=step,
                directory=str(self.path_of(step)),
                synchronous=self._running is None,
                checkpoint_manager_blocking_start_time=began,
                checkpoint_manager_blocking_duration_secs=time.time() - began,
            )
        )
        return True

    def _log_entry(self, entry: SaveStepStatistics | RestoreStepStatistics) -> None:
        if self._logger is not None:
            self._logger.log_entry(asdict(entry))

    def _save_args(self, items: Any, save_kwargs: Any, args: Any) -> tuple[Composite, bool]:
        """Return the args of each item, and True if there is one item without a name.

        Raises ValueError for args that do not fit the manager.
        """
        _refuse_args(items)
        if args is None and items is None:
            raise ValueError("Must provide `args` for `save`.")
        if args is None:
            return self._old_args(SAVE, items, save_kwargs or {}), bool(self._single)
        given = adopt(args)
        if not is_args(given):
            raise ValueError(f"`args` must be a CheckpointArgs, such as StandardSave, not {args!r}")
        if not isinstance(given, Composite):
            if self._single is False:
                raise _needs_composite()
            return Composite(default=given), True
        if self._single:
            raise ValueError("Cannot provide `args` of type `Composite`: there is one item here.")
        for name in RESERVED_ITEM_NAMES:
            if name in given:
                raise ValueError(f"Cannot save item with reserved name {name!r}.")
        return given, False

    def _old_args(self, which: int, items: Any, kwargs: Any) -> Composite:
        """Turn `items` and `save_kwargs` or `restore_kwargs` into args."""
        known = self._handler.known
        if not known:
            raise ValueError(
                "`items` is for a manager with checkpointers or item_handlers; give `args=` here."
            )
        if self._single:
            return Composite(default=args_for(which, known["default"], (items,), kwargs))
        unknown = [name for name in items if name not in known]
        if unknown:
            raise ValueError(f'Unknown key "{unknown[0]}" in CompositeCheckpointHandler.')
        return Composite(
            **{n: args_for(which, known[n], (items[n],), kwargs.get(n) or {}) for n in items}
        )

    # Restoring

    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: Any = None,
        args: Any = None,
    ) -> Any:
        """Restore a step, the latest if None. Return its one item, or a Composite of several."""
        _refuse_args(items)
        self.wait_until_finished()
        began = time.time()
        step = self.latest_step() if step is None else step
        if step is None:
            raise FileNotFoundError(f"No steps found in {self._directory}.")
        if directory is None:
            opened = self._open(step)
        else:
            opened = OpenCheckpoint(as_path(directory) / self._naming.build_name(step))
        given = adopt(args)
        single = self._is_single(opened) and not isinstance(given, Composite)
        if args is None and (items is not None or restore_kwargs is not None):
            kwargs = restore_kwargs or {}
            if not self._single:
                names = {**(items or {}), **kwargs} or opened.items()
                items = {name: (items or {}).get(name) for name in names}
            given = self._old_args(RESTORE, items, kwargs)
        if given is not None and not isinstance(given, Composite):
            if not single:
                raise _needs_composite()
            given = Composite(default=given)
        found = self._handler.read(opened, given)
        if given is None and not single and opened.metrics is not None:
            found |= Composite(metrics=opened.metrics)
        self._log_entry(
            RestoreStepStatistics(
                step=step,
                directory=str(opened.path),
                checkpoint_manager_start_time=began,
                checkpoint_manager_duration_secs=time.time() - began,
            )
        )
        return found["default"] if single else found

    def _open(self, step: int) -> OpenCheckpoint:
        if step not in self._names:
            # Another program may have saved it since.
            self._names.update(self._find())
        return OpenCheckpoint(self.path_of(step))

    def _is_single(self, opened: OpenCheckpoint) -> bool:
        if self._single is not None:
            return self._single
        return opened.is_single or list(opened.items()) == ["default"]


def _refuse_args(items: Any) -> None:
    if is_args(items):
        raise ValueError(
            "Found an instance of `CheckpointArgs` provided for `items`. Give it as args=."
        )


def _needs_composite() -> ValueError:
    return ValueError(
        "Must provide `args` of type `Composite` when dealing with multiple checkpointable objects."
    )
