"""Checkpointers: one checkpoint at a path, saved at once or in the background."""

from __future__ import annotations

from typing import Any, Self

from ostraka.compat.orbax import args as args_lib
from ostraka.compat.orbax import handlers as handlers_lib
from ostraka.compat.orbax._engine import OpenCheckpoint, write
from ostraka.compat.orbax._names import refuse_options
from ostraka.compat.orbax.metadata import StepMetadata, step_metadata
from ostraka.compat.orbax.options import AsyncOptions as AsyncOptions
from ostraka.compat.orbax.options import CompositeOptions, MultiprocessingOptions, names_of
from ostraka.saving.background import SaveHandle

_IGNORED = (
    *names_of(CompositeOptions, MultiprocessingOptions),
    "checkpoint_metadata_store",
    "barrier_sync_fn",
)


class AbstractCheckpointer:
    """The base class of checkpointers."""


class BackgroundSaves:
    """Base class of objects that save in the background. Their `with` block waits for the save."""

    _running: SaveHandle | None = None

    def wait_until_finished(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.wait_until_finished()

    def check_for_errors(self) -> None:
        """Raise the error of a save in the background that has failed by now."""
        if self._running is not None and self._running.done():
            self.wait_until_finished()

    def is_saving_in_progress(self) -> bool:
        return self._running is not None and not self._running.done()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Checkpointer(BackgroundSaves, AbstractCheckpointer):
    """Saves one checkpoint at a path with a handler. `save` returns once it is committed."""

    _background = False

    def __init__(self, handler: Any, **options: Any):
        refuse_options(type(self).__name__, options, _IGNORED)
        self._handler = handler() if isinstance(handler, type) else handler
        self._timeout_s: float | None = None
        self._after: Any = None

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
        """Save to a path. Raises ValueError if the path exists, unless `force`."""
        self.wait_until_finished()
        given = handlers_lib.args_for(handlers_lib.SAVE, self._handler, args, kwargs)
        self._running = write(
            directory,
            handlers_lib.payload_of(self._handler, given, background=self._background),
            custom=custom_metadata,
            force=force,
            background=self._background,
            max_file_bytes=handlers_lib.file_size_of(given),
            on_commit=self._after,
        )

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Restore from a path. Raises FileNotFoundError if there is no checkpoint."""
        self.wait_until_finished()
        given = handlers_lib.args_for(handlers_lib.RESTORE, self._handler, args, kwargs)
        found = handlers_lib.part_of(self._handler, OpenCheckpoint(directory))
        return handlers_lib.read_item(self._handler, found, given)

    def metadata(self, directory: Any) -> StepMetadata:
        """Return the metadata of a checkpoint. It is empty if there is none at the path."""
        self.wait_until_finished()
        try:
            opened = OpenCheckpoint(directory)
        except FileNotFoundError:
            return StepMetadata()
        found = handlers_lib.part_of(self._handler, opened)
        return step_metadata(opened, handlers_lib.describe_item(self._handler, found))

    def wait_until_finished(self) -> None:
        """Wait for the save in the background. Raises its error."""
        running, self._running = self._running, None
        if running is not None:
            running.wait(self._timeout_s)

    def close(self) -> None:
        self.wait_until_finished()
        if hasattr(self._handler, "close"):
            self._handler.close()


class AsyncCheckpointer(Checkpointer):
    """A `Checkpointer` whose `save` returns as soon as the values are copied."""

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
    """Saves trees. `save` returns once the checkpoint is committed."""

    def __init__(
        self,
        primary_host: int | None = 0,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        use_compression: bool = True,
        **options: Any,
    ):
        super().__init__(handlers_lib.PyTreeCheckpointHandler(), **options)


class StandardCheckpointer(AsyncCheckpointer):
    """Saves trees of arrays and numbers in the background."""

    def __init__(self, *, async_options: AsyncOptions | None = None, **options: Any):
        super().__init__(
            handlers_lib.StandardCheckpointHandler(), async_options=async_options, **options
        )

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

    def restore(self, directory: Any, target: Any = None, **options: Any) -> Any:
        """Restore like a target. Takes the options of `args.StandardRestore`."""
        return super().restore(directory, args=args_lib.StandardRestore(target, **options))
