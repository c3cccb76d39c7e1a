"""The names of steps, and which of them are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ostraka._foreign import names_in
from ostraka._step_names import step_of
from ostraka.compat.orbax._place import as_path, is_finished, store_at
from ostraka.compat.orbax._refuse import refuse

__getattr__ = refuse(__name__)

TMP_DIR_SUFFIX = ".orbax-checkpoint-tmp"


@dataclass(frozen=True)
class Metadata:
    """A step that is there."""

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
        """The step of a directory's name, in this form or as Ostraka's own manager names it."""
        prefix = re.escape(f"{self.step_prefix}_") if self.step_prefix else ""
        match = re.fullmatch(rf"{prefix}([0-9]{{1,200}})", name)
        if match:
            return int(match[1])
        return step_of(name) if name.startswith("step_") else None

    def find_names(self, directory: Any) -> dict[int, str]:
        """The finished steps of a directory, ascending, each with the name of its directory."""
        store = store_at(directory)
        found: dict[int, str] = {}
        for name in sorted(names_in(store)):
            step = self.step_named(name)
            if step is None or (step in found and name != self.build_name(step)):
                continue
            if is_finished(store.at(name)):
                found[step] = name
        return dict(sorted(found.items()))

    def find_all(self, base_path: Any) -> Iterator[Metadata]:
        base = as_path(base_path)
        for step, name in self.find_names(base_path).items():
            yield Metadata(step, base / name)

    def find_step(self, base_path: Any, step: int) -> Metadata:
        for found in self.find_all(base_path):
            if found.step == step:
                return found
        raise ValueError(f"No step path found with name={self.build_name(step)} in {base_path}")


def standard_name_format(
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    single_host_load_and_broadcast: bool = False,
) -> NameFormat:
    return NameFormat(step_prefix, step_format_fixed_length)


def build_step_path(base_path: Any, name_format: NameFormat, step: int) -> Any:
    return as_path(base_path) / name_format.build_name(step)


def find_step_path(
    base_path: Any, name_format: NameFormat, *, step: int, include_uncommitted: bool = False
) -> Any:
    return name_format.find_step(base_path, step).path


def checkpoint_steps(
    checkpoint_dir: Any, single_host_load_and_broadcast: bool = False
) -> list[int]:
    """The steps of a directory, whatever prefix their names have."""
    store = store_at(checkpoint_dir)
    steps: set[int] = set()
    for name in names_in(store):
        match = re.fullmatch(r"(?:.*_)?([0-9]{1,200})", name)
        if match and is_finished(store.at(name)):
            steps.add(int(match[1]))
    return sorted(steps)


def any_checkpoint_step(checkpoint_dir: Any) -> int | None:
    steps = checkpoint_steps(checkpoint_dir)
    return steps[0] if steps else None


def checkpoint_steps_paths(checkpoint_dir: Any) -> list[Any]:
    store = store_at(checkpoint_dir)
    base = as_path(checkpoint_dir)
    names = [n for n in names_in(store) if re.fullmatch(r"(?:.*_)?([0-9]{1,200})", n)]
    return [base / name for name in sorted(names) if is_finished(store.at(name))]


def step_from_checkpoint_name(name: str) -> int:
    """The step that a name ends in: 7 of `7`, `0007`, `checkpoint_7`."""
    match = re.fullmatch(r"(?:.*_)?([0-9]{1,200})", name)
    if not match:
        raise ValueError(f"Unrecognized name format: {name}.")
    return int(match[1])


def is_tmp_checkpoint(path: Any) -> bool:
    return TMP_DIR_SUFFIX in as_path(path).name


def is_checkpoint_finalized(path: Any) -> bool:
    """Whether a directory is a finished checkpoint. Raises ValueError if there is none."""
    store = store_at(path)
    if not store.exists():
        raise ValueError(f"Checkpoint path {path} does not exist.")
    return not is_tmp_checkpoint(path) and is_finished(store)


def is_path_finalized(path: Any) -> bool:
    return is_checkpoint_finalized(path)


def tmp_checkpoints(checkpoint_dir: Any) -> list[str]:
    return [name for name in names_in(store_at(checkpoint_dir)) if TMP_DIR_SUFFIX in name]


def get_save_directory(
    step: int,
    directory: Any,
    name: str | None = None,
    step_prefix: str | None = None,
    override_directory: Any = None,
    step_format_fixed_length: int | None = None,
) -> Any:
    """The directory of a step, or of an item of it."""
    base = as_path(directory if override_directory is None else override_directory)
    made = base
    if override_directory is None:
        made = base / NameFormat(step_prefix, step_format_fixed_length).build_name(step)
    return made if name is None else made / name


def latest_and_path(
    directory: Any, prefix: str | None, length: int | None, name_format: Any
) -> int | None:
    """The newest step; None if there is none."""
    naming = name_format if name_format is not None else NameFormat(prefix, length)
    return max((found.step for found in naming.find_all(directory)), default=None)
