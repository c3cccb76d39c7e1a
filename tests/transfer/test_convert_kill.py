"""A conversion that is killed, interrupted or runs out of room; and how much memory it takes."""

import os
import random
import signal
import subprocess
import sys
import time
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import ostraka
from figures import Figures
from mounts import mounted
from orbax_cases import ocp, quiet
from ostraka.errors import Busy, OstrakaError
from ostraka.testing import run_processes
from replacing import TARGETS


def tree(leaves: int = 24, elements: int = 1 << 16) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {f"w{n}": rng.normal(size=(16, elements // 16)) for n in range(leaves)}


def arrays_in(path: Path, to: str) -> dict[str, np.ndarray[Any, Any]]:
    """What the program that a format belongs to reads."""
    if to == "ostraka":
        assert ostraka.verify(path).ok
        return ostraka.restore(path)
    if to == "orbax":
        with quiet():
            return ocp.PyTreeCheckpointer().restore(path)
    if to == "npz":
        with np.load(path, allow_pickle=False) as found:
            return dict(found)
    return load_file(path / "model.safetensors" if to == "hf" else path)


def check(path: Path, to: str, wanted: dict[str, Any], *, alone: bool = True) -> None:
    found = arrays_in(path, to)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)
    left = [name for name in os.listdir(path.parent) if name not in ("a", "began", path.name)]
    assert not alone or left == []


SIZES = {
    "convert.work._TOGETHER_BYTES": 1 << 16,
    "convert._write_orbax._TOGETHER_BYTES": 1 << 16,
    "convert.work.BAND_BYTES": 1 << 17,
    "convert._write_ostraka.MAX_FILE_BYTES": 1 << 20,
    "_streamed._SMALL_BYTES": 0,
    "convert.work.SLAB_BYTES": 1 << 19,
    "convert.work._LEAST_RUN_BYTES": 64,
}
"""As if arrays were large."""
NEVER = 1000
"""In hundredths."""


def turn(path: str, shape: Any) -> Any:
    return {"path": path, "transpose": True}


def convert_until(
    source: Path, target: Path, to: Any, at: int, how: signal.Signals, transposed: bool
) -> None:
    """In a process of its own: send it a signal when so many hundredths are done."""
    for name, size in SIZES.items():
        module, _, attribute = name.rpartition(".")
        setattr(import_module(f"ostraka.transfer.{module}"), attribute, size)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sent: list[bool] = []

    def tell(done: int, total: int) -> None:
        # Half of it is writing, the other half reading back. Once: a second Ctrl-C does not wait
        # for threads any more, and TensorStore aborts a program that ends while one calls it.
        if 100 * done >= at * total and not sent:
            sent.append(True)
            os.kill(os.getpid(), how)

    (source.parent / "began").touch()
    try:
        ostraka.convert(source, target, to=to, names=turn if transposed else None, on_bytes=tell)
    except KeyboardInterrupt:
        sys.exit(130)


def kill(
    source: Path,
    target: Path,
    to: str,
    at: int,
    how: signal.Signals = signal.SIGKILL,
    *,
    transposed: bool = False,
) -> None:
    arguments = (source, target, to, at, how, transposed)
    (done,) = run_processes(convert_until, *arguments, processes=1, check=False)
    assert done.exit_code == (130 if how == signal.SIGINT else -signal.SIGKILL), done
    assert not target.exists() or not (target / "_METADATA").exists()
    (source.parent / "began").unlink()


def finish(source: Path, target: Path, to: Any, *, transposed: bool = False) -> int:
    """Convert here, with the same sizes. Returns how many bytes were kept."""
    with pytest.MonkeyPatch.context() as patched:
        for name, size in SIZES.items():
            patched.setattr(f"ostraka.transfer.{name}", size)
        names = turn if transposed else None
        return ostraka.convert(source, target, to=to, names=names).bytes_kept


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_conversion_that_was_killed_goes_on(tmp_path: Path, to: str, transposed: bool):
    """If it transposes, its pieces are parts of all rows of a file."""
    wanted = tree()
    if transposed:
        rng = np.random.default_rng(0)
        wanted = {f"w{n}": rng.random((4096, 1000), np.float32) for n in range(3)}
    ostraka.save(tmp_path / "a", wanted, max_file_bytes="1MB")
    target = tmp_path / TARGETS[to]
    for kill_at in (20, 45) if transposed else (1, 45):
        kill(tmp_path / "a", target, to, kill_at, transposed=transposed)
    assert finish(tmp_path / "a", target, to, transposed=transposed) > 0
    check(target, to, {name: array.T if transposed else array for name, array in wanted.items()})


@pytest.mark.parametrize("to", TARGETS)
def test_an_interrupt(tmp_path: Path, to: Any):
    wanted = tree(8)
    ostraka.save(tmp_path / "a", wanted)
    target = tmp_path / TARGETS[to]
    kill(tmp_path / "a", target, to, 10, signal.SIGINT)
    ostraka.convert(tmp_path / "a", target, to=to)
    check(target, to, wanted)


@pytest.mark.soak
@pytest.mark.parametrize("to", TARGETS)
def test_killed_at_random(tmp_path: Path, to: str, figures: Figures):
    """Killed by a clock, so that it dies anywhere: in a write, a commit, a sync, a rename."""
    wanted = tree()
    ostraka.save(tmp_path / "a", wanted, max_file_bytes="1MB")
    target = tmp_path / TARGETS[to]
    began = tmp_path / "began"
    rng = random.Random(to)
    kills = 0

    def kill_soon(children: list[subprocess.Popen[bytes]]) -> None:
        while not began.exists():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.6))
        children[0].kill()

    for _ in range(12):
        began.unlink(missing_ok=True)
        arguments = (tmp_path / "a", target, to, NEVER, signal.SIGKILL, False)
        (done,) = run_processes(
            convert_until, *arguments, processes=1, check=False, on_start=kill_soon
        )
        is_killed = done.exit_code == -signal.SIGKILL
        assert is_killed or done.exit_code == 0 or "PathInTheWay" in (done.error or ""), done
        kills += is_killed
        if target.exists() and (to != "ostraka" or (target / "_METADATA").exists()):
            check(target, to, wanted, alone=False)
            if rng.random() < 0.5:
                subprocess.run(["rm", "-r", str(target)], check=True)
    if not target.exists() or (to == "ostraka" and not (target / "_METADATA").exists()):
        finish(tmp_path / "a", target, to)
    check(target, to, wanted, alone=False)
    figures.add("conversions killed with -9", kills)


@pytest.mark.parametrize("to", ["ostraka", "orbax", "safetensors", "npz"])
def test_what_a_killed_conversion_left_is_not_believed(tmp_path: Path, to: str):
    """Bytes of a killed conversion that were lost or changed since then are written again."""
    wanted = tree()
    ostraka.save(tmp_path / "a", wanted)
    target = tmp_path / TARGETS[to]
    kill(tmp_path / "a", target, to, 40)
    place = target if to == "ostraka" else tmp_path / f"{target.name}.converting" / "files"
    files = [file for file in place.rglob("*") if file.is_file() and "_CLAIM" not in file.name]
    assert files
    for file in files:
        data = bytearray(file.read_bytes())
        data[len(data) // 3 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 3)
        file.write_bytes(data)
    finish(tmp_path / "a", target, to)
    check(target, to, wanted)


def test_a_conversion_of_something_else_begins_anew(tmp_path: Path):
    wanted = tree(8)
    ostraka.save(tmp_path / "a", wanted)
    target = tmp_path / "out.npz"
    kill(tmp_path / "a", target, "npz", 20)
    other = {name: array + 1 for name, array in wanted.items()}
    ostraka.save(tmp_path / "a", other)
    assert finish(tmp_path / "a", target, "npz") == 0
    check(target, "npz", other)


def test_two_at_the_same_time(tmp_path: Path):
    ostraka.save(tmp_path / "a", tree(8))
    inside: list[Exception] = []

    def once(done: int, total: int) -> None:
        if not inside:
            inside.append(ValueError("none was raised"))
            try:
                ostraka.convert(tmp_path / "a", tmp_path / "out", to="hf")
            except Busy as error:
                inside[0] = error

    ostraka.convert(tmp_path / "a", tmp_path / "out", to="hf", on_bytes=once)
    assert isinstance(inside[0], Busy)


@pytest.mark.parametrize("to", TARGETS)
def test_a_full_disk(tmp_path: Path, to: Any, monkeypatch: pytest.MonkeyPatch):
    for name in SIZES:
        if name.endswith(("_TOGETHER_BYTES", "MAX_FILE_BYTES")):
            monkeypatch.setattr(f"ostraka.transfer.{name}", 1 << 20)
    wanted = tree()
    ostraka.save(tmp_path / "a", wanted)
    options, why = "size=8M", "converting to a disk that is full"
    with mounted(tmp_path / "small", options=options, for_what=why) as small:
        target = small / TARGETS[to]
        with pytest.raises(OstrakaError, match=r"No space left on device|RESOURCE_EXHAUSTED"):
            ostraka.convert(tmp_path / "a", target, to=to)
        assert not target.exists() or not (target / "_METADATA").exists()
        subprocess.run(["mount", "-o", "remount,size=64M", str(small)], check=True)
        report = ostraka.convert(tmp_path / "a", target, to=to)
        assert report.bytes_kept > 0
        check(target, to, wanted)


# Memory

MEASURE = """
import sys
import numpy as np
import ostraka
from ostraka.transfer.convert import convert
source, target, to, transposed = sys.argv[1:]
def name(path, shape):
    return {"path": path, "transpose": True}
def most_kib():
    # Not getrusage: a process begins with the most that the one which started it has ever had.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
before = most_kib()
convert(source, target, to=to, names=name if transposed == "yes" else None)
print(most_kib() - before)
"""


def measure(tmp_path: Path, to: str, *, transposed: bool) -> int:
    """How many KiB a conversion takes beyond what its program has before."""
    target = tmp_path / TARGETS[to]
    arguments = [str(tmp_path / "a"), str(target), to, "yes" if transposed else "no"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    subprocess.run(["rm", "-r", str(target)], check=True)
    return int(done.stdout)


# No more than 512 MiB for 2 GiB: in one array, in several, transposed too.
@pytest.mark.parametrize(
    ("to", "transposed", "mib", "leaves"),
    [
        ("orbax", False, 640, 1),
        ("npz", True, 640, 1),
        *(
            pytest.param(*case, 2048, leaves, marks=pytest.mark.soak)
            for case in product(TARGETS, (False, True))
            for leaves in (1, 16)
        ),
    ],
)
def test_memory_is_bounded(
    tmp_path: Path, to: str, transposed: bool, mib: int, leaves: int, figures: Figures
):
    rows = (mib << 20) // leaves // 4 // 8192
    array = np.random.default_rng(0).random((rows, 8192), np.float32)
    ostraka.save(tmp_path / "a", {f"w{n}": array for n in range(leaves)})
    assert 16 << 10 < measure(tmp_path, to, transposed=transposed) < 512 << 10
    if mib == 2048:
        figures.add("conversions of 2 GiB measured")
