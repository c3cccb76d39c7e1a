"""The names of steps, and the steps of a directory."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ostraka.compat.orbax._files import as_path
from ostraka.compat.orbax._names import absent
from ostraka.formats import has_finished_checkpoint
from ostraka.formats.source import names_in
from ostraka.layout.file_names import step_of
from ostraka.storage import open_store

step: Any
atomicity: Any
"""This module: `path` has two modules in Orbax."""
TMP_DIR_SUFFIX = ".orbax-checkpoint-tmp"


@dataclass(frozen=True)
class Metadata:
    """A finished step."""

    step: int
    path: Any


@dataclass(frozen=True)
class NameFormat:
    """How the directory of a step is called: `prefix_0007`."""

    step_prefix: str | None = None
    step_format_fixed_length: int | None = None

    def build_name(self, step: int) -> str:
        digits = str(step).zfill(self.step_format_fixed_length or 0)
        return f"{self.step_prefix}_{digits}" if self.step_prefix else digits

    def step_named(self, name: str) -> int | None:
        """Return the step of a directory's name, in this form or as Ostraka's manager names it."""
        prefix = re.escape(f"{self.step_prefix}_") if self.step_prefix else ""
        match = re.fullmatch(rf"{prefix}([0-9]{{1,200}})", name)
        if match:
            return int(match[1])
        return step_of(name) if name.startswith("step_") else None

    def find_all(self, base_path: Any) -> Iterator[Metadata]:
        """Return the finished steps of a directory, ascending."""
        store, base = open_store(base_path), as_path(base_path)
        found: dict[int, str] = {}
        for name in sorted(names_in(store)):
            step = self.step_named(name)
            if step is None or (step in found and name != self.build_name(step)):
                continue
            if has_finished_checkpoint(store.at(name)):
                found[step] = name
        return (Metadata(step, base / name) for step, name in sorted(found.items()))

    def find_step(self, base_path: Any, step: int) -> Metadata:
        found = maybe_find_step_metadata(base_path, self, step=step)
        if found is None:
            raise ValueError(f"No step path found with name={self.build_name(step)} in {base_path}")
        return found


def standard_name_format(
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    single_host_load_and_broadcast: bool = False,
) -> NameFormat:
    return NameFormat(step_prefix, step_format_fixed_length)


def is_standard_name_format(name_format: Any) -> bool:
    return isinstance(name_format, NameFormat)


def build_step_path(base_path: Any, name_format: NameFormat, step: int) -> Any:
    return as_path(base_path) / name_format.build_name(step)


find_step_path = absent("step.find_step_path", "use the find_step of a name format")


def latest_step_metadata(root_path: Any, name_format: Any) -> Any:
    """Return the newest step, or None if there is none."""
    return max(name_format.find_all(root_path), key=lambda found: found.step, default=None)


def maybe_find_step_metadata(base_path: Any, name_format: Any, *, step: int) -> Any:
    return next((found for found in name_format.find_all(base_path) if found.step == step), None)


def build_step_metadatas(step_paths: Any, build_metadata: Any) -> Iterator[Any]:
    """Yield the results of `build_metadata` for each path, without None."""
    made = (build_metadata(path) for path in step_paths)
    return (found for found in made if found is not None)


def step_from_checkpoint_name(name: str) -> int:
    """Return the step that a name ends in: 7 for `7`, `0007`, `checkpoint_7`."""
    match = re.fullmatch(r"(?:.*_)?([0-9]{1,200})", name)
    if not match:
        raise ValueError(f"Unrecognized name format: {name}.")
    return int(match[1])


def checkpoint_steps(
    checkpoint_dir: Any, single_host_load_and_broadcast: bool = False
) -> list[int]:
    """Return the steps of a directory, whatever prefix their names have."""
    paths = checkpoint_steps_paths(checkpoint_dir)
    return sorted({step_from_checkpoint_name(path.name) for path in paths})


def checkpoint_steps_paths(checkpoint_dir: Any) -> list[Any]:
    store, base = open_store(checkpoint_dir), as_path(checkpoint_dir)
    names = [n for n in sorted(names_in(store)) if re.fullmatch(r"(?:.*_)?[0-9]{1,200}", n)]
    return [base / name for name in names if has_finished_checkpoint(store.at(name))]


def any_checkpoint_step(checkpoint_dir: Any) -> int | None:
    return next(iter(checkpoint_steps(checkpoint_dir)), None)


def is_tmp_checkpoint(path: Any) -> bool:
    return TMP_DIR_SUFFIX in as_path(path).name


def is_path_temporary(path: Any, *unused: Any, **options: Any) -> bool:
    return is_tmp_checkpoint(path)


def is_checkpoint_finalized(path: Any) -> bool:
    """True if a directory is a finished checkpoint. Raises ValueError if it does not exist."""
    store = open_store(path)
    if not store.exists():
        raise ValueError(f"Checkpoint path {path} does not exist.")
    return not is_tmp_checkpoint(path) and has_finished_checkpoint(store)


is_path_finalized = is_checkpoint_finalized


def tmp_checkpoints(checkpoint_dir: Any) -> list[str]:
    return [name for name in names_in(open_store(checkpoint_dir)) if TMP_DIR_SUFFIX in name]


def get_save_directory(
    step: int,
    directory: Any,
    name: str | None = None,
    step_prefix: str | None = None,
    override_directory: Any = None,
    step_format_fixed_length: int | None = None,
) -> Any:
    """Return the directory of a step, or of an item in it."""
    if override_directory is not None:
        made = as_path(override_directory)
    else:
        naming = NameFormat(step_prefix, step_format_fixed_length)
        made = build_step_path(directory, naming, step)
    return made if name is None else made / name


def step_prefix_with_underscore(step_prefix: str | None) -> str:
    return "" if step_prefix is None else f"{step_prefix}_"


# atomicity: accepted as `temporary_path_class`, without effect


class AtomicRenameTemporaryPath:
    """Ostraka commits every checkpoint atomically."""


class CommitFileTemporaryPath:
    """Ostraka commits every checkpoint atomically."""


def get_tmp_directory(final_path: Any) -> Any:
    """Return the path at which Orbax would write a checkpoint before it is finished."""
    final = as_path(final_path)
    return final.parent / f"{final.name}{TMP_DIR_SUFFIX}"


def create_tmp_directory(tmp_dir: Any, final_dir: Any, **options: Any) -> Any:
    """Make the directory of an unfinished checkpoint. Replaces one of the same name."""
    made = as_path(tmp_dir)
    if made.exists():
        if not is_tmp_checkpoint(made):
            raise FileExistsError(f"{made} exists, and may be a finished checkpoint")
        shutil.rmtree(made)
    made.mkdir(parents=True)
    return made


_get_tmp_directory, _create_tmp_directory = get_tmp_directory, create_tmp_directory
