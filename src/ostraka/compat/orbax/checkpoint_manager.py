"""The manager of a run's steps, as Orbax has it, over steps of ours and of Orbax's."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from ostraka._handle import SaveHandle
from ostraka.compat.orbax import args as args_lib
from ostraka.compat.orbax._engine import About, Opened, as_json, write
from ostraka.compat.orbax._manager_options import (
    CheckpointManagerOptions as CheckpointManagerOptions,
)
from ostraka.compat.orbax._place import as_path, remove, store_at
from ostraka.compat.orbax._refuse import refuse
from ostraka.compat.orbax.checkpoint_managers.preservation_policy import (
    PolicyCheckpointInfo,
    PreservationContext,
    ranked,
)
from ostraka.compat.orbax.checkpoint_managers.save_decision_policy import DecisionContext
from ostraka.compat.orbax.handlers import (
    CompositeCheckpointHandler,
    composite_payloads,
    describe_composite,
    file_size_of,
    read_composite,
    restore_args_for,
    save_args_for,
)
from ostraka.compat.orbax.metadata import RootMetadata, StepMetadata, step_metadata
from ostraka.compat.orbax.multihost import reached_preemption
from ostraka.compat.orbax.options import AsyncOptions as AsyncOptions
from ostraka.compat.orbax.options import FileOptions as FileOptions
from ostraka.compat.orbax.options import MultiprocessingOptions as MultiprocessingOptions
from ostraka.manager._together import decide_together

__getattr__ = refuse(__name__)

DEFAULT_ITEM_NAME = "default"
METRIC_ITEM_NAME = "metrics"
RESERVED_ITEM_NAMES = (METRIC_ITEM_NAME,)
_ROOT_METADATA = "ostraka.orbax.json"

log = logging.getLogger("ostraka")


class StepAlreadyExistsError(ValueError):
    """A step was saved with `force` that is there already."""


class AbstractCheckpointManager:
    """What all managers are."""


class CheckpointManager(AbstractCheckpointManager):
    """The steps of a run below one directory, each one checkpoint of ours; Orbax's beside them."""

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
        self._options = options or CheckpointManagerOptions()
        self._directory = as_path(directory)
        self._naming = self._options.naming()
        self._when, self._keep = self._options.when(), self._options.keep()
        self._single: bool | None = None
        self._handler = self._composite(
            checkpointers, tuple(item_names or ()), item_handlers, handler_registry
        )
        self._infos: list[PolicyCheckpointInfo] = []
        self._names: dict[int, str] = {}
        self._running: SaveHandle | None = None
        self._saving: int | None = None
        self._before: list[PolicyCheckpointInfo] = []
        """The steps there were with the one that is being saved, before any was to go."""
        self._closed = False
        store = store_at(directory)
        if self._options.create and not self._options.read_only:
            store.prepare()
        self._root_metadata = self._keep_root_metadata(dict(metadata or {}))
        self._read_steps()

    def _composite(
        self, checkpointers: Any, names: tuple[str, ...], handlers: Any, registry: Any
    ) -> CompositeCheckpointHandler:
        """Who saves which item; and whether there is one without a name, if that is known."""
        if checkpointers is not None and (names or handlers is not None or registry is not None):
            raise ValueError(
                "`checkpointers` can't be given together with `item_names`, `item_handlers` or "
                "`handler_registry`."
            )
        if registry is not None and (names or handlers is not None):
            raise ValueError("`handler_registry` can't be given together with `item_handlers`.")
        if checkpointers is not None:
            given: Any = checkpointers
            if isinstance(given, Mapping):
                handlers = {k: c.handler for k, c in given.items()}
            else:
                handlers = given.handler
        if isinstance(handlers, Mapping):
            self._single = False
            return CompositeCheckpointHandler(*names, **{str(k): h for k, h in handlers.items()})
        if handlers is not None:
            self._single = True
            if isinstance(handlers, CompositeCheckpointHandler):
                self._single = False
                return handlers
            return CompositeCheckpointHandler(**{DEFAULT_ITEM_NAME: handlers})
        if names:
            self._single = False
        return CompositeCheckpointHandler(*names, handler_registry=registry)

    # What is there

    @property
    def directory(self) -> Any:
        return self._directory

    def all_steps(self, read: bool = False) -> list[int]:
        """The steps that are there, or being saved, ascending; with `read` looked up again."""
        if read:
            self.reload()
        self._forget_failed()
        return [info.step for info in self._infos]

    def latest_step(self) -> int | None:
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """The best step by `best_fn`; None if no step has metrics, the latest without `best_fn`."""
        if self._options.best_fn is None:
            return self.latest_step()
        self._forget_failed()
        best = ranked(self._infos, self._options.best_fn, self._options.best_mode == "min")
        return best[-1].step if best else None

    def reload(self) -> None:
        """Look at the disk again."""
        self.wait_until_finished()
        self._read_steps()

    def metrics(self, step: int) -> Any:
        self._forget_failed()
        return next((info.metrics for info in self._infos if info.step == step), None)

    def metadata(self, step: int | None = None) -> RootMetadata | StepMetadata:
        """Of a step: its items and `custom_metadata`; else that which the manager was given."""
        if step is None:
            return RootMetadata(custom_metadata=dict(self._root_metadata))
        opened = self._open(step)
        return step_metadata(opened, self._describe(opened))

    def item_metadata(self, step: int | None) -> Any:
        """What each leaf is, without reading arrays: of the one item, or a Composite."""
        if step is None:
            raise ValueError("`step` must be provided.")
        return self._describe(self._open(step))

    def _describe(self, opened: Opened) -> Any:
        described = describe_composite(self._handler, opened)
        return described[DEFAULT_ITEM_NAME] if self._is_single(opened) else described

    # Saving

    def should_save(self, step: int) -> bool:
        if self._options.read_only:
            return False
        latest = self.latest_step()
        if latest is not None and latest >= step:
            return False
        context = DecisionContext(
            is_saving_in_progress=self.is_saving_in_progress(),
            reached_preemption=self.reached_preemption(step),
            multiprocessing_options=self._options.multiprocessing_options,
        )
        now = PolicyCheckpointInfo(step, datetime.now(UTC))
        return bool(self._when.should_save(now, list(self._infos), context=context))

    def reached_preemption(self, step: int) -> bool:
        return reached_preemption(step)

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
        """Save a step if it is time to, or in any case with `force`; returns whether it does."""
        step = int(step)
        given, single = self._save_args(items, save_kwargs, args)
        if self._options.read_only or (not force and not self.should_save(step)):
            return False
        self.wait_until_finished()
        self._single = single
        if any(info.step == step for info in self._infos):
            raise StepAlreadyExistsError(f"Checkpoint for step {step} already exists.")
        self.begin(
            step,
            composite_payloads(self._handler, given),
            metrics=metrics,
            custom_metadata=custom_metadata,
            max_file_bytes=file_size_of(given),
        )
        return True

    def begin(
        self,
        step: int,
        payloads: Mapping[str, Any],
        *,
        metrics: Any,
        custom_metadata: Any,
        max_file_bytes: int | None = None,
    ) -> None:
        """Begin to save items that are ready, whatever the policies say."""
        self.wait_until_finished()
        kept = None if metrics is None else as_json(metrics, "metrics")
        about = About(as_json(custom_metadata or {}, "custom_metadata"), kept, step)
        gone = self._add(PolicyCheckpointInfo(step, datetime.now(UTC), metrics))
        self._saving = step
        try:
            self._running = write(
                self.path_of(step),
                payloads[DEFAULT_ITEM_NAME] if self._is_default(payloads) else payloads,
                about,
                force=True,
                background=self._options.enable_async_checkpointing,
                max_file_bytes=max_file_bytes,
                on_commit=lambda: self._remove(gone),
            )
        except BaseException:
            self._forget_saving()
            raise
        if self._running is None:
            self._saving = None

    def _is_default(self, payloads: Mapping[str, Any]) -> bool:
        return bool(self._single) and list(payloads) == [DEFAULT_ITEM_NAME]

    def _save_args(self, items: Any, save_kwargs: Any, args: Any) -> tuple[Any, bool]:
        """What to save, as a Composite, and whether that is one item without a name.

        Raises ValueError for what does not fit the manager.
        """
        if args_lib.is_args(items):
            raise ValueError(
                "Found an instance of `CheckpointArgs` provided for `items`. Give it as args=."
            )
        if args is None and items is None:
            raise ValueError("Must provide `args` for `save`.")
        if args is None:
            return self._old_args(items, save_kwargs or {}, save_args_for), bool(self._single)
        given = args_lib.adopt(args)
        if not args_lib.is_args(given):
            raise ValueError(f"`args` must be a CheckpointArgs, such as StandardSave, not {args!r}")
        several = isinstance(given, args_lib.Composite)
        if several and self._single:
            raise ValueError("Cannot provide `args` of type `Composite`: there is one item here.")
        if not several and self._single is False:
            raise ValueError(
                "Must provide `args` of type `Composite` when dealing with multiple checkpointable "
                "objects."
            )
        for name in given.keys() if several else ():
            if name in RESERVED_ITEM_NAMES:
                raise ValueError(f"Cannot save item with reserved name {name!r}.")
        if several:
            return given, False
        return args_lib.Composite(**{DEFAULT_ITEM_NAME: given}), True

    def _old_args(self, items: Any, kwargs: Any, make: Any) -> Any:
        """`items` and `save_kwargs` or `restore_kwargs`, of one item or a dict of several."""
        known = self._handler.known
        if not known:
            raise ValueError(
                "`items` is for a manager with checkpointers or item_handlers; give `args=` here."
            )
        if self._single:
            return args_lib.Composite(
                **{DEFAULT_ITEM_NAME: make(known[DEFAULT_ITEM_NAME], (items,), dict(kwargs))}
            )
        unknown = [name for name in items if name not in known]
        if unknown:
            raise ValueError(f'Unknown key "{unknown[0]}" in CompositeCheckpointHandler.')
        return args_lib.Composite(
            **{n: make(known[n], (items[n],), dict(kwargs.get(n) or {})) for n in items}
        )

    def _add(self, info: PolicyCheckpointInfo) -> list[tuple[int, str]]:
        """Add a step to those that are there; returns those that have to go once it is."""
        self._infos = sorted([*self._infos, info], key=lambda known: known.step)
        self._names[info.step] = self._naming.build_name(info.step)
        context = PreservationContext(self._options.multiprocessing_options)
        kept = self._keep.should_preserve(list(self._infos), context=context)
        self._before = list(self._infos)
        leaving = [known for known, keep in zip(self._infos, kept, strict=True) if not keep]
        self._infos = [known for known in self._infos if known not in leaving]
        return [(known.step, self._names[known.step]) for known in leaving]

    def _remove(self, gone: list[tuple[int, str]]) -> None:
        """On process 0, once a step is there: delete those that it has made superfluous."""
        store = store_at(self._directory)
        for step, name in gone:
            try:
                remove(store.at(name))
            except Exception:
                log.exception("step %d of %s can't be deleted now", step, self._directory)

    # Waiting

    def wait_until_finished(self) -> None:
        """Wait for the save in the background; raises its error."""
        running, self._running = self._running, None
        if running is None:
            return
        options = self._options.async_options
        error = running.exception(options.timeout_secs if options else None)
        if error is not None:
            self._forget_saving()
            raise error
        self._saving = None

    def check_for_errors(self) -> None:
        """Raise the error of a save in the background that has failed by now."""
        if self._running is not None and self._running.done():
            self.wait_until_finished()

    def is_saving_in_progress(self) -> bool:
        return self._running is not None and not self._running.done()

    def _forget_failed(self) -> None:
        """A step that could not be saved is none; its error is raised when it is waited for."""
        running = self._running
        if running is not None and running.done() and self._saving is not None:
            if running.exception() is not None:
                self._forget_saving()
            self._saving = None

    def _forget_saving(self) -> None:
        if self._saving is not None:
            self._infos = [info for info in self._before if info.step != self._saving]
            self._saving = None

    # Restoring

    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: Any = None,
        args: Any = None,
    ) -> Any:
        """Restore a step, with None the latest: its one item, or a Composite of several."""
        if args_lib.is_args(items):
            raise ValueError(
                "Found an instance of `CheckpointArgs` provided for `items`. Give it as args=."
            )
        self.wait_until_finished()
        opened = self._open_for_restore(step, directory)
        given = None if args is None else args_lib.adopt(args)
        if args is None and (items is not None or restore_kwargs is not None):
            given = self._old_restore_args(opened, items, restore_kwargs or {})
        is_named = isinstance(args, args_lib.Composite) or type(args).__name__ == "CompositeArgs"
        single = self._is_single(opened) and not is_named
        if given is not None and not isinstance(given, args_lib.Composite):
            if not single:
                raise ValueError(
                    "Must provide `args` of type `Composite` when dealing with multiple "
                    "checkpointable objects."
                )
            given = args_lib.Composite(**{DEFAULT_ITEM_NAME: given})
        asked_metrics = given is None and not single and opened.metrics is not None
        found = read_composite(self._handler, opened, given)
        if asked_metrics:
            found = args_lib.Composite(**{**dict(found.items()), "metrics": opened.metrics})
        return found[DEFAULT_ITEM_NAME] if single else found

    def _old_restore_args(self, opened: Opened, items: Any, kwargs: Any) -> Any:
        if self._single:
            return self._old_args(items, kwargs, restore_args_for)
        names = {**(items or {}), **kwargs} if items or kwargs else opened.items()
        return self._old_args(
            {name: (items or {}).get(name) for name in names}, kwargs, restore_args_for
        )

    def _open_for_restore(self, step: int | None, directory: Any) -> Opened:
        if step is None:
            step = self.latest_step()
            if step is None:
                raise FileNotFoundError(f"No steps found in {self._directory}.")
        if directory is not None:
            return Opened(as_path(directory) / self._naming.build_name(step))
        return self._open(step)

    def _open(self, step: int) -> Opened:
        path = self.path_of(step)
        if step not in self._names:
            # Another program may have saved it since.
            self._names.update(self._naming.find_names(self._directory))
            path = self.path_of(step)
        return Opened(path)

    def _is_single(self, opened: Opened) -> bool:
        if self._single is not None:
            return self._single
        return opened.is_single or list(opened.items()) == [DEFAULT_ITEM_NAME]

    # Changing what is there

    def delete(self, step: int) -> None:
        """Delete a step. Raises FileNotFoundError if it is not there."""
        if self._options.read_only:
            return
        self.wait_until_finished()
        if all(info.step != step for info in self._infos):
            raise FileNotFoundError(f"Requested deleting a non-existent step: {step}.")
        name = self._names[step]
        decide_together(
            f"deletion of step {step}", lambda: remove(store_at(self._directory).at(name))
        )
        self._infos = [info for info in self._infos if info.step != step]

    def close(self) -> None:
        """Wait for the save in the background; raises its error."""
        self.wait_until_finished()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Inside

    def path_of(self, step: int) -> Any:
        return self._directory / self._names.get(step, self._naming.build_name(step))

    def _read_steps(self) -> None:
        """Look at the disk, on process 0 for all."""

        def look() -> list[list[Any]]:
            found: list[list[Any]] = []
            for step, name in self._find().items():
                opened = Opened(self._directory / name)
                saved = opened.source.saved.writer.get("time")
                found.append([step, name, saved, opened.metrics])
            return found

        found = decide_together(f"look at {self._directory}", look)
        self._infos, self._names = [], {}
        for step, name, saved, metrics in found:
            when = datetime.fromisoformat(saved) if saved else datetime.now(UTC)
            self._infos.append(PolicyCheckpointInfo(step, when, metrics))
            self._names[step] = name

    def _find(self) -> dict[int, str]:
        if hasattr(self._naming, "find_names"):
            return self._naming.find_names(self._directory)
        return {found.step: found.path.name for found in self._naming.find_all(self._directory)}

    def _keep_root_metadata(self, given: dict[str, Any]) -> dict[str, Any]:
        """What the manager was given as `metadata`, kept in the root by the first one."""
        store = store_at(self._directory)

        def keep() -> dict[str, Any]:
            if store.look(_ROOT_METADATA) is not None:
                return json.loads(store.get(_ROOT_METADATA))
            if given and not self._options.read_only and self._options.save_root_metadata:
                store.put(_ROOT_METADATA, json.dumps(given).encode())
            return given

        return decide_together(f"look at {self._directory}", keep)
