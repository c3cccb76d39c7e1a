"""A process of a group: `python -m world.process GROUP PHASE FOLDER`, the cases' keys on stdin."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from world.case import load_group
from world.phases import run_phase


def main() -> None:
    group, phase, folder = sys.argv[1:]
    keys = json.load(sys.stdin)
    run_phase(phase, [case for case in load_group(group) if case.key in keys], Path(folder))


if __name__ == "__main__":
    main()
