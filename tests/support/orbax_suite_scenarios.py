"""More scenarios: what the test suites of others found, run with only their import changed."""

from __future__ import annotations

import importlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

from orbax_scenarios import same, scenario, tree


@scenario("subclasses of CheckpointManager: what they override", "wrap ostraka.Manager")
def managers_that_override_private_methods(ocp: Any, d: Path) -> None:
    """`_checkpoints`, `_load_checkpoint_infos`, `_finalize_checkpoint`, as in AXLearn"""
    lib = ocp.checkpoint_manager

    class Tracking(ocp.CheckpointManager):
        """Remembers the latest step in a file, and looks at nothing else."""

        def all_steps(self, read: bool = False) -> list[int]:
            return [info.step for info in self._checkpoints]

        def _load_checkpoint_infos(self, skip_metadata_read: bool = False) -> list[Any]:
            tracker = self.directory / "latest.txt"
            if not tracker.exists():
                return super()._load_checkpoint_infos(skip_metadata_read)
            return [lib.CheckpointInfo(int(tracker.read_text()), datetime.now(UTC), None)]

        def _finalize_checkpoint(self, step: int) -> Any:
            super()._finalize_checkpoint(step)
            assert ocp.utils.is_primary_host(self._multiprocessing_options.primary_host)
            path = self._get_write_step_directory(step, self.directory)
            assert ocp.step.is_path_finalized(path)
            (self.directory / "latest.txt").write_text(str(step))

    when = lib._ShouldSaveFnPolicy(lambda step, last: step % 2 == 0)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_decision_policy=when)
    with Tracking(d / "m", options=options) as manager:
        done = [manager.save(n, args=ocp.args.StandardSave(tree())) for n in range(5)]
        assert done == [True, False, True, False, True]
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 4]
    with Tracking(d / "m", options=options) as manager:
        assert (manager.all_steps(), manager.latest_step()) == ([4], 4)
        same(manager.restore(4), tree())
        manager.save(6, args=ocp.args.StandardSave(tree()))
        manager.save(8, args=ocp.args.StandardSave(tree()))
    assert sorted(ocp.utils.checkpoint_steps(d / "m")) == [2, 6, 8]


@scenario("AbstractCheckpointManager, emergency managers", "mirror=")
def emergency_managers_have_methods(ocp: Any, d: Path) -> None:
    """names that `mock.Mock(spec=)` of an emergency manager needs in MaxText's tests"""
    emergency = importlib.import_module(f"{ocp.__name__}.experimental.emergency.checkpoint_manager")
    manager = mock.Mock(spec=emergency.CheckpointManager)
    assert isinstance(manager, emergency.CheckpointManager)
    assert not isinstance(manager, ocp.CheckpointManager)
    manager.restore.return_value = 3
    assert manager.restore(0) == 3
    for name in ("save", "latest_step", "all_steps", "should_save", "close", "directory"):
        assert hasattr(manager, name)
