"""Directories that somebody has prepared, and all that a user may do with them.

A root has a good step 1, and a step 2 that is hostile in one way. Beside it lies what is none of
its business: `outside`. Run as a program this takes every kind of directory through every function
and command, and prints a line before and after each: whoever reads them sees a hang.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import stat
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

SECRET = "the secret outside"
HUGE_BYTES = 30 << 30
MEMORY_BYTES = 512 << 20
"""What all of it may take beyond what a process with JAX has."""

Make = Callable[[Path, Path], None]
"""Put something at a path, where nothing is, given what is outside."""


def make_socket(path: Path, outside: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # The path of a socket is short.
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def make_device(path: Path, outside: Path) -> None:
    with suppress(PermissionError):
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # as /dev/zero
        return
    os.mkfifo(path)


def make_full_directory(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / "file").write_text("in it")
    (path / "link").symlink_to(outside)
    os.mkfifo(path / "pipe")


def make_deep_directory(path: Path, outside: Path) -> None:
    path.mkdir()
    here = os.open(path, os.O_RDONLY)
    for _ in range(200):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def make_odd_names(path: Path, outside: Path) -> None:
    path.mkdir()
    for name in (b"\xff\xfe", b"new\nline", b"\x1b[31m", b"-rf", b"x" * 255):
        os.close(os.open(os.fsencode(path) + b"/" + name, os.O_CREAT | os.O_WRONLY, 0o600))


def make_sparse(path: Path, outside: Path) -> None:
    path.touch()
    os.truncate(path, HUGE_BYTES)


def make_sparse_of_ours(path: Path, outside: Path) -> None:
    """As it should be at its beginning, and endless."""
    path.write_bytes(b'{"format":"ostraka","version":1,"id":"0123456789abcdef",')
    os.truncate(path, HUGE_BYTES)


def link_to(target: str) -> Make:
    def make(path: Path, outside: Path) -> None:
        path.symlink_to(outside / target if not target.startswith(("/", ".")) else target)

    return make


def link_to_what_was_there(path: Path, outside: Path) -> None:
    """As in the cache of Hugging Face: the same bytes, elsewhere."""
    step = next(one for one in (path, *path.parents) if one.name.startswith("step_"))
    path.symlink_to(outside / "step_00000002" / path.relative_to(step))


INSTEAD: dict[str, Make] = {
    "a pipe": lambda path, outside: os.mkfifo(path),
    "a socket": make_socket,
    "a device": make_device,
    "a directory": lambda path, outside: path.mkdir(),
    "a full directory": make_full_directory,
    "an empty file": lambda path, outside: path.touch(),
    "a sparse file": make_sparse,
    "a link to the same": link_to_what_was_there,
    "a link to a secret": link_to("secret"),
    "a link to a directory": link_to("directory"),
    "a link to nowhere": link_to("nowhere"),
    "a link to itself": lambda path, outside: path.symlink_to(path.name),
    "a link to zeros": link_to("/dev/zero"),
    "a link to a pipe": link_to("pipe"),
    "a hard link": lambda path, outside: os.link(outside / "secret", path),
}
OWN = ("save", "save in the background", "copy to it")
"""These are given the step's path: if it is a link it is the user's own, and written through."""
CLAIM = "_CLAIM-" + "0" * 32
LEFTOVER = "shards-0123456789abcdef"
ODD: dict[str, Make] = {
    "a deep directory": make_deep_directory,
    "odd names": make_odd_names,
    "a sparse file of ours": make_sparse_of_ours,
}


def places(step: Path) -> dict[str, Path]:
    """What is replaced in a step, and what is added to it and its root."""
    shards = next(step.glob("shards-*"))
    return {
        "_METADATA": step / "_METADATA",
        "shards": shards,
        "a shard": next(shards.glob("shard_*")),
        "an index": next(shards.glob("process_*")),
        "a pin": step / "_PINNED",
        "a claim": step / CLAIM,
        "a temporary file": step / "_METADATA.0123.tmp",
        "a leftover": step / LEFTOVER,
        "in the shards": shards / "extra",
        "a lease": step.parent / "_LEASE-host.1.0123-step-2",
        "a claim on the root": step.parent / CLAIM,
        "the step": step,
        "another step": step.parent / "step_00000003",
    }


def kinds() -> list[tuple[str, str]]:
    """Where, and what."""
    replaced = ("_METADATA", "shards", "a shard", "an index", "the step")
    every = [(where, what) for where in replaced for what in INSTEAD]
    some = ("a pipe", "a full directory", "a link to a secret", "a link to a directory")
    added = ("a pin", "a claim", "a temporary file", "a leftover", "in the shards", "a lease")
    added += ("a claim on the root", "another step")
    every += [(where, what) for where in added for what in some]
    every += [("a leftover", what) for what in ODD]
    every += [("_METADATA", "a sparse file of ours"), ("shards", "a deep directory")]
    every += [("the step", "odd names"), ("a claim", "a deep directory")]
    return [kind for kind in every if kind != ("the step", "a hard link")]


def functions() -> dict[str, Callable[[Path, Path, Path], Any]]:
    """What is done with a root, its hostile step, and a place that is free."""
    import numpy as np

    import ostraka
    from cli_runs import run
    from ostraka import Manager

    tree = {"w": np.arange(12.0).reshape(3, 4), "n": np.int32(1)}

    def manage(work: Callable[[Manager], Any], **options: Any) -> Callable[[Path, Path, Path], Any]:
        def call(root: Path, step: Path, free: Path) -> Any:
            with Manager(root, asynchronous=False, **options) as manager:
                return work(manager)

        return call

    def look(root: Path, step: Path, free: Path) -> Any:
        manager = Manager(root, read_only=True)
        assert 1 in manager.steps(), "a bad step blocks the root"
        assert manager.restore(1)["n"] == 1
        return list(manager.watch(timeout_s=0))

    def command(*words: str) -> Callable[[Path, Path, Path], Any]:
        def call(root: Path, step: Path, free: Path) -> Any:
            names = {"ROOT": root, "STEP": step, "FREE": free, "GOOD": root / "step_00000001"}
            result = run(*(names.get(word, word) for word in words))
            said = result.stdout + result.stderr
            assert result.exit_code in (0, 1, 2), said
            assert result.exit_code == 0 or len(result.stderr.splitlines()) <= 1, said
            assert "-v shows where it comes from" not in said, said
            assert result.exit_code == 0 or said, words
            assert SECRET not in said, said
            assert "\x1b[31m" not in said, said
            return result.exit_code, said

        return call

    return {
        "open": lambda root, step, free: ostraka.open(step)["w"][:],
        "restore": lambda root, step, free: ostraka.restore(step),
        "verify": lambda root, step, free: ostraka.verify(step),
        "verify all": lambda root, step, free: ostraka.verify(root, raises=False),
        "save": lambda root, step, free: ostraka.save(step, tree),
        "save in the background": lambda root, step, free: ostraka.save_async(step, tree).wait(),
        "copy": lambda root, step, free: ostraka.copy(step, free),
        "copy the root": lambda root, step, free: ostraka.copy(root, free),
        "copy to it": lambda root, step, free: ostraka.copy(root / "step_00000001", step),
        "copy to the root": lambda root, step, free: ostraka.copy(copied(root, free), root),
        "a reader": look,
        "latest": lambda root, step, free: Manager(root, read_only=True).latest(),
        "restore the newest": manage(lambda manager: manager.restore(fallback=True)),
        "save the next": manage(lambda manager: manager.save(4, tree), keep=1),
        "save it again": manage(lambda manager: manager.save(2, tree)),
        "delete": manage(lambda manager: manager.delete(2)),
        "pin": manage(lambda manager: (manager.pin(2), manager.unpin(2))),
        "mirror": lambda root, step, free: mirror(root, free, tree),
        "mirror to it": lambda root, step, free: mirror(copied(root, free), root, tree),
        "show": command("show", "STEP"),
        "show as json": command("show", "STEP", "--json"),
        "show statistics": command("show", "STEP", "--stats"),
        "diff": command("diff", "GOOD", "STEP"),
        "ls": command("ls", "ROOT"),
        "ls --verify": command("ls", "ROOT", "--verify", "--json"),
        "gc": command("gc", "ROOT"),
        "gc --yes": command("gc", "ROOT", "--yes"),
        "gc of it": command("gc", "STEP", "--yes", "--json"),
        "rm": command("rm", "ROOT", "2"),
        "rm --yes": command("rm", "ROOT", "2", "--yes", "--force"),
        "the command verify": command("verify", "ROOT"),
        "the command copy": command("copy", "STEP", "FREE"),
        "plan": command("plan", "STEP"),
    }


def copied(root: Path, free: Path) -> Path:
    """A root with the good step alone, under the name of the hostile one."""
    free.mkdir()
    shutil.copytree(root / "step_00000001", free / "step_00000002")
    return free


def mirror(root: Path, other: Path, tree: Any) -> None:
    from ostraka import Manager

    with Manager(root, asynchronous=False, mirror=other, keep=5) as manager:
        manager.save(9, tree)


def build_outside(template: Path, outside: Path) -> None:
    shutil.copytree(template, outside)
    (outside / "secret").write_text(SECRET)
    (outside / "directory").mkdir()
    (outside / "directory" / "file").write_text(SECRET)
    os.mkfifo(outside / "pipe")


def build(template: Path, base: Path, where: str, what: str) -> tuple[Path, Path]:
    """A root and its hostile step, in an empty directory."""
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()
    root, outside = base / "root", base.parent / "outside"
    shutil.copytree(template, root)
    place = places(root / "step_00000002")[where]
    if place.is_dir():
        shutil.rmtree(place)
    elif place.exists():
        place.unlink()
    (INSTEAD | ODD)[what](place, outside)
    return root, root / "step_00000002"


def describe(outside: Path) -> list[Any]:
    """All that could change outside, but for times of reading."""
    found: list[Any] = []
    for above, _, names in os.walk(outside):
        for path in (above, *(f"{above}/{name}" for name in names)):
            status = os.lstat(path)
            found.append((path, status.st_mode, status.st_mtime_ns, status.st_size, status.st_ino))
    return sorted(found)


def attempt(
    work: Callable[[Path, Path, Path], Any], root: Path, step: Path, outside: Path
) -> tuple[str, str]:
    """What is wrong, '' if all is well; and what was said."""
    from ostraka.errors import OstrakaError

    before = describe(outside)
    said = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = work(root, step, root.parent / "free")
        said = repr(result)
    except OstrakaError as error:
        said = str(error)
        if "\n" in said.strip() and "for " not in said:
            return "not one sentence", said
    except BaseException:
        return traceback.format_exc(), said
    if SECRET in said:
        return "the secret was read", said
    return "" if describe(outside) == before else "what is outside has changed", said


def main(folder: Path) -> None:
    import logging

    import numpy as np

    import ostraka
    from ostraka.storage import _claim

    logging.disable()
    _claim.RENEW_EVERY_S, _claim.DEAD_AFTER_S = 0.05, 0.2  # for claims that nobody renews
    template = folder / "template"
    for step in (1, 2):
        tree = {"w": np.arange(12.0).reshape(3, 4), "n": np.int32(step)}
        ostraka.save(template / f"step_{step:08}", tree)
    build_outside(template, folder / "outside")
    todo = functions()
    # A file of 30 GiB that is read whole shall end this program alone.
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit_bytes = used_bytes + (2 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    every = int(sys.argv[2])
    for number, (where, what) in enumerate(kinds()):
        base = folder / str(number)
        for turn, (name, work) in enumerate(todo.items()):
            if (number + turn) % every or (where == "the step" and "link" in what and name in OWN):
                continue
            print(f"begin\t{name}: {what} in the place of {where}", flush=True)
            root, step = build(template, base, where, what)
            wrong, said = attempt(work, root, step, folder / "outside")
            print(f"end\t{wrong!r}\t{said[:300]!r}", flush=True)
        shutil.rmtree(base, ignore_errors=True)
    more_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - peak_bytes
    wrong = f"{more_bytes:,} bytes of memory" if more_bytes > MEMORY_BYTES else ""
    print(f"begin\tmemory\nend\t{wrong!r}\t''\ndone\t{len(kinds())}\t{len(todo)}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
