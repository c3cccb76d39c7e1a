"""`python -m world`: run the cases, print the table, end with 1 if any failed."""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

from world.case import Case, group_names, load_group
from world.runner import ROOT, failures, run_groups
from world.table import failure_lines, markdown_table, plain_table, put_between_marks, summary

_DOCUMENT = ROOT / "docs" / "maintainers" / "world.md"
_printing = threading.Lock()


def main() -> int:
    options = _parse()
    groups, missing = _load(options.only)
    for name, reason in missing.items():
        print(f"SKIPPED  {name}: {reason}", flush=True)
    if options.list:
        for name, cases in groups.items():
            print("\n".join(f"{name}: {case.key} ({case.shows})" for case in cases))
        return 0
    if not groups:
        print("no case matches, or none can be imported", file=sys.stderr)
        return 2
    scratch = Path(options.scratch or tempfile.mkdtemp(prefix="ostraka-world-"))
    rows = run_groups(groups, scratch, jobs=options.jobs, told=_tell)
    print(plain_table(rows))
    failed = failures(rows)
    print(f"\n{_versions()}: {summary(rows)}, {len(failed)} failed")
    if options.write_docs:
        table = f"{_versions()}: {summary(rows)}.\n\n{markdown_table(rows)}"
        _DOCUMENT.write_text(put_between_marks(_DOCUMENT.read_text("utf-8"), table), "utf-8")
    if failed:
        print("\n".join(["", *failure_lines(failed), f"(what they left is in {scratch})"]))
    # A package that is not there is not a pass.
    return 1 if failed or (missing and not options.skip_missing) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m world", description=__doc__)
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="group or 'package: name'"
    )
    parser.add_argument("--list", action="store_true", help="list the cases and do nothing")
    parser.add_argument("--jobs", type=int, default=2, help="groups at a time (2)")
    parser.add_argument("--scratch", help="a new folder for checkpoints; what passes is removed")
    parser.add_argument(
        "--write-docs", action="store_true", help="put the table into docs/maintainers/world.md"
    )
    parser.add_argument(
        "--skip-missing", action="store_true", help="groups that can't be imported are no failure"
    )
    return parser.parse_args()


def _load(only: list[str] | None) -> tuple[dict[str, list[Case]], dict[str, str]]:
    """The cases by group, and the groups that can't be imported with the reason."""
    groups: dict[str, list[Case]] = {}
    missing: dict[str, str] = {}
    for name in group_names():
        try:
            cases = load_group(name)
        except Exception as error:  # what a package raises that does not suit the others
            missing[name] = f"{type(error).__name__}: {error}"
            continue
        wanted = [case for case in cases if _matches(name, case, only)]
        if wanted:
            groups[name] = wanted
    return groups, missing


def _matches(group: str, case: Case, only: list[str] | None) -> bool:
    return not only or any(fnmatch(group, p) or fnmatch(case.key, p) for p in only)


def _versions() -> str:
    python = ".".join(map(str, sys.version_info[:3]))
    return f"Python {python}, JAX {version('jax')}, Flax {version('flax')}"


def _tell(line: str) -> None:
    with _printing:
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
