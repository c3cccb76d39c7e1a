"""`training.Checkpointer`: the steps of a run, as v1 has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostraka.compat.orbax import checkpoint_managers as preservation_policies
from ostraka.compat.orbax._engine import OpenCheckpoint
from ostraka.compat.orbax.checkpoint_manager import CheckpointManagerOptions, RunSteps
from ostraka.compat.orbax.future import AsyncResponse
from ostraka.compat.orbax.metadata import RootMetadata as RootMetadata
from ostraka.compat.orbax.v1 import _items as items_lib
from ostraka.compat.orbax.v1 import errors as errors
from ostraka.compat.orbax.v1._items import AUTO, STATE
from ostraka.compat.orbax.v1._items import CheckpointMetadata as CheckpointMetadata
from ostraka.compat.orbax.v1.options import Context, active_context

save_decision_policies = preservation_policies


class Checkpointer(RunSteps):
    """The steps of a run below one directory."""

    def __init__(
        self,
        directory: Any,
        *,
        context: Any = None,
        save_decision_policy: Any = None,
        preservation_policy: Any = None,
        step_name_format: Any = None,
        custom_metadata: Any = None,
        cleanup_tmp_directories: bool = False,
        lightweight_initialize: bool = False,
        logger: Any = None,
    ):
        self._context = Context(context or active_context())
        deletion = self._context.deletion.gcs_deletion_options
        options = CheckpointManagerOptions(
            save_decision_policy=save_decision_policy,
            preservation_policy=preservation_policy,
            step_name_format=step_name_format,
            async_options=self._context.async_options,
            todelete_full_path=deletion.todelete_full_path,
        )
        super().__init__(directory, options, custom_metadata)

    @property
    def latest(self) -> CheckpointMetadata | None:
        return next(reversed(self.checkpoints), None)

    @property
    def checkpoints(self) -> Sequence[CheckpointMetadata]:
        """The steps, ascending, each with `step`, `metrics` and `path`."""
        return [
            CheckpointMetadata(step=step, metrics=self.metrics(step), path=self.path_of(step))
            for step in self.all_steps()
        ]

    # Saving

    def save(
        self, step: int, state: Any, *, checkpointable_name: str = STATE, **options: Any
    ) -> bool:
        """Save a tree if the policy says so. Return True if it was saved.

        Takes the options of `save_checkpointables_async`.
        """
        return self.save_checkpointables(step, {checkpointable_name: state}, **options)

    def save_async(
        self, step: int, state: Any, *, checkpointable_name: str = STATE, **options: Any
    ) -> AsyncResponse | None:
        """Save a tree in the background. Return None if the policy says no."""
        return self.save_checkpointables_async(step, {checkpointable_name: state}, **options)

    def save_checkpointables(
        self, step: int, checkpointables: Mapping[str, Any], **options: Any
    ) -> bool:
        response = self.save_checkpointables_async(step, checkpointables, **options)
        return False if response is None else response.result()

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: Mapping[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> AsyncResponse | None:
        """Save several trees and objects in the background. Return None if the policy says no."""
        if step in self.all_steps():
            if not overwrite:
                raise errors.StepAlreadyExistsError(f"Step {step} already exists.")
            self.delete(step)
        if not force and not self.should_save(step):
            return None
        payloads = items_lib.payloads_of(checkpointables, self._context)
        self.begin(step, payloads, metrics=metrics, custom=custom_metadata)

        def wait(timeout: float | None) -> bool:
            self.wait_until_finished()
            return True

        return AsyncResponse(wait)

    # Loading

    def load(
        self, step: Any = None, abstract_state: Any = None, *, checkpointable_name: str = AUTO
    ) -> Any:
        opened, name = self._open(step), checkpointable_name
        return items_lib.load_tree(opened, abstract_state, name, self._context)

    def load_async(self, step: Any = None, abstract_state: Any = None) -> AsyncResponse:
        return AsyncResponse(lambda _: self.load(step, abstract_state))

    def load_checkpointables(
        self, step: Any = None, abstract_checkpointables: Any = None
    ) -> dict[str, Any]:
        return items_lib.load_items(self._open(step), abstract_checkpointables, self._context)

    def load_checkpointables_async(
        self, step: Any = None, abstract_checkpointables: Any = None
    ) -> Any:
        return AsyncResponse(lambda _: self.load_checkpointables(step, abstract_checkpointables))

    save_pytree, save_pytree_async = save, save_async
    load_pytree, load_pytree_async = load, load_async

    def pytree_metadata(self, step: Any = None) -> CheckpointMetadata:
        return items_lib.tree_of(self._open(step), AUTO)

    metadata = pytree_metadata

    def checkpointables_metadata(self, step: Any = None) -> CheckpointMetadata:
        return items_lib.items_of(self._open(step))

    def _open(self, step: Any) -> OpenCheckpoint:
        self.wait_until_finished()
        number = getattr(step, "step", step)
        if number is None:
            number = self.latest_step()
        if number is None or number not in self.all_steps():
            raise errors.StepNotFoundError(f"No checkpoint found at step {number}.")
        return OpenCheckpoint(self.path_of(number))

    # Deleting and waiting

    def delete_async(self, step: int) -> AsyncResponse:
        """Delete a step before this returns."""
        self.delete(step)
        return AsyncResponse(lambda _: None)

    def wait(self) -> None:
        self.wait_until_finished()
