"""Print the share of lines and branches that a run reached, by folder of the package."""

import json
import sys
from collections import defaultdict
from pathlib import Path, PurePosixPath


def main(report: str) -> None:
    totals: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    names = ("covered_lines", "num_statements", "covered_branches", "num_branches")
    for file, found in json.loads(Path(report).read_text())["files"].items():
        inside = PurePosixPath(file.rpartition("src/ostraka/")[2]).parts
        for folder in (inside[0] if len(inside) > 1 else "(top)", "all"):
            for column, name in enumerate(names):
                totals[folder][column] += found["summary"][name]
    print(f"{'folder':12} {'lines':>8} {'branches':>9} {'both':>7}")
    for folder, (lines, all_lines, branches, all_branches) in sorted(totals.items()):
        both = 100 * (lines + branches) / max(all_lines + all_branches, 1)
        print(
            f"{folder:12} {100 * lines / max(all_lines, 1):7.2f}% "
            f"{100 * branches / max(all_branches, 1):8.2f}% {both:6.2f}%"
        )


if __name__ == "__main__":
    main(sys.argv[1])
