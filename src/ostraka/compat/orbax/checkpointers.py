"""Checkpointers: one checkpoint at a path, now or in the background."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from ostraka._handle import SaveHandle
from ostraka.compat.orbax import args as args_lib
from ostraka.compat.orbax._engine import About, Opened, as_json, write
from ostraka.compat.orbax._refuse import refuse, refuse_options
from ostraka.compat.orbax.handlers import (
    CompositeCheckpointHandler,
    PyTreeCheckpointHandler,
    StandardCheckpointHandler,
    composite_payloads,
    describe_composite,
    describe_item,
    file_size_of,
    payload_of,
    read_composite,
    read_item,
    restore_args_for,
    save_args_for,
)
from ostraka.compat.orbax.metadata import StepMetadata, step_metadata
from ostraka.compat.orbax.options import AsyncOptions as AsyncOptions

__getattr__ = refuse(__name__)

_HARMLESS = (
    "multiprocessing_options",
    "file_options",
    "checkpoint_metadata_store",
    "temporary_path_class",
    "primary_host",
    "active_processes",
    "barrier_sync_key_prefix",
    "barrier_sync_fn",
)


class AbstractCheckpointer:
    """What all checkpointers are."""


class Checkpointer(AbstractCheckpointer):
    """One checkpoint at a path, by a handler; `save` returns when it is there."""

    _background = False

    def __init__(self, handler: Any, **options: Any):
        refuse_options(type(self).__name__, options, _HARMLESS)
        self._handler = handler() if isinstance(handler, type) else handler
        self._timeout_s: float | None = None
        self._after: Any = None
        self._running: SaveHandle | None = None

    @property
    def handler(self) -> Any:
        return self._handler

    def save(
        self,
        directory: Any,
        *args: Any,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save to a path. Raises ValueError if something is there, unless `force`."""
        self.wait_until_finished()
        given = save_args_for(self._handler, args, kwargs)
        if isinstance(self._handler, CompositeCheckpointHandler):
            items: Any = composite_payloads(self._handler, given)
        else:
            items = payload_of(self._handler, given)
        custom = as_json(custom_metadata or {}, "custom_metadata")
        self._running = write(
            directory,
            items,
            About(custom),
            force=force,
            background=self._background,
            max_file_bytes=file_size_of(given),
            on_commit=self._after,
        )

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Restore from a path. Raises FileNotFoundError if there is no checkpoint."""
        self.wait_until_finished()
        given = restore_args_for(self._handler, args, kwargs)
        opened = Opened(directory)
        if isinstance(self._handler, CompositeCheckpointHandler):
            return read_composite(self._handler, opened, given)
        return read_item(self._handler, opened.item(None), given)

    def metadata(self, directory: Any) -> StepMetadata:
        """What is saved at a path; empty if nothing is."""
        self.wait_until_finished()
        try:
            opened = Opened(directory)
        except FileNotFoundError:
            return StepMetadata()
        if isinstance(self._handler, CompositeCheckpointHandler):
            return step_metadata(opened, describe_composite(self._handler, opened))
        return step_metadata(opened, describe_item(self._handler, opened.item(None)))

    def wait_until_finished(self) -> None:
        """Wait for the save in the background, and raise its error."""
        running, self._running = self._running, None
        if running is not None:
            running.wait(self._timeout_s)

    def check_for_errors(self) -> None:
        """Raise the error of a save in the background that has failed by now."""
        if self._running is not None and self._running.done():
            self.wait_until_finished()

    def is_saving_in_progress(self) -> bool:
        return self._running is not None and not self._running.done()

    def close(self) -> None:
        self.wait_until_finished()
        if hasattr(self._handler, "close"):
            self._handler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncCheckpointer(Checkpointer):
    """As `Checkpointer`, and `save` returns as soon as the values are safe."""

    _background = True

    def __init__(
        self,
        handler: Any,
        timeout_secs: int | None = None,
        *,
        async_options: AsyncOptions | None = None,
        post_finalization_callback: Any = None,
        **options: Any,
    ):
        super().__init__(handler, **options)
        self._timeout_s = timeout_secs
        if async_options is not None:
            self._timeout_s = async_options.timeout_secs
            self._after = async_options.post_finalization_callback
        self._after = post_finalization_callback or self._after


class PyTreeCheckpointer(Checkpointer):
    """Trees, at once."""

    def __init__(self, use_ocdbt: bool = True, use_zarr3: bool = False, **options: Any):
        super().__init__(PyTreeCheckpointHandler(), **options)


class StandardCheckpointer(AsyncCheckpointer):
    """Trees of arrays and numbers; `save` goes on in the background."""

    def __init__(self, *, async_options: AsyncOptions | None = None, **options: Any):
        super().__init__(StandardCheckpointHandler(), async_options=async_options, **options)

    def save(
        self,
        directory: Any,
        state: Any,
        *,
        save_args: Any = None,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
    ) -> None:
        args = args_lib.StandardSave(state, save_args)
        super().save(directory, args=args, force=force, custom_metadata=custom_metadata)

    def restore(
        self,
        directory: Any,
        target: Any = None,
        *,
        strict: bool = True,
        support_layout: bool = False,
        fallback_sharding: Any = None,
    ) -> Any:
        args = args_lib.StandardRestore(target, strict, support_layout, fallback_sharding)
        return super().restore(directory, args=args)
