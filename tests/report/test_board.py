"""The board of a run: what it shows while a run goes on, and whom it refuses."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import ostraka
from browser import click, complaints, open_page
from browser import wait_until as wait_in_page
from cli_runs import PROGRAM, run
from ostraka.report.board import Board
from ostraka.report.feed import find_changes
from ostraka.report.run import describe_run
from ostraka.testing import FaultyStore
from runs import Gate, damage, fill, wait_until

TOKEN = "a-token-of-this-test"
TRAIN = """
import sys
import jax.numpy as jnp
from ostraka import Manager

state = {"w": jnp.zeros((8, 8)), "step": 0}
with Manager(sys.argv[1], every=1, keep=4) as manager:
    for line in sys.stdin:
        step = int(line)
        state = {"w": state["w"] + 1, "step": step}
        manager.save(step, state, metrics={"loss": 1 / (1 + step)})
        manager.wait()
        print("saved", flush=True)
"""


@contextmanager
def board_of(root: Path, *options: str, token: str | None = TOKEN) -> Generator[tuple[Any, int]]:
    """`ostraka board` in a process of its own, and its port."""
    environment = {name: text for name, text in os.environ.items() if name != "OSTRAKA_BOARD_TOKEN"}
    if token is not None:
        environment["OSTRAKA_BOARD_TOKEN"] = token
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "board", str(root), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), process.stderr and process.stderr.read()
        yield process, int(address.partition("127.0.0.1:")[2].partition("/")[0])
    finally:
        process.kill()
        process.communicate()


@contextmanager
def board_here(path: Any, host: str = "127.0.0.1") -> Generator[Board]:
    """A board in this process."""
    board = Board(path, host=host, port=0, token=TOKEN)
    thread = threading.Thread(target=board.serve, daemon=True)
    thread.start()
    yield board
    board.close()
    thread.join()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    root = tmp_path_factory.mktemp("served") / "run"
    fill(root, 1, 2, 3)
    (root.parent / "secret").mkdir()
    ostraka.save(root.parent / "secret" / "step_00000009", {"a": 1})
    (root / "step_00000009").symlink_to(root.parent / "secret" / "step_00000009")
    with board_of(root) as (_, port):
        yield root, port


def ask(port: int, path: str, *, method: str = "GET", **headers: str) -> tuple[int, Any, Any]:
    """The status, headers and JSON of an answer. Names of headers have `_` for `-`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=named)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    is_json = answer.headers["Content-Type"] == "application/json" and data
    return answer.status, answer.headers, json.loads(data) if is_json else data.decode()


# Whom it answers


def test_with_the_token_it_answers(served: tuple[Path, int]):
    root, port = served
    status, headers, page = ask(port, f"/?token={TOKEN}")
    assert status == 200
    assert "<!doctype html>" in page
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    status, _, found = ask(port, "/api/run", X_Ostraka_Token=TOKEN)
    assert status == 200
    assert found["steps"] == describe_run(root)["steps"]
    own = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}
    assert ask(port, f"/api/run?token={TOKEN}", **own)[0] == 200
    # Behind `ssh -L 8000:127.0.0.1:…` the browser knows another port.
    assert ask(port, f"/api/run?token={TOKEN}", Host="127.0.0.1:8000")[0] == 200
    assert ask(port, f"/?token={TOKEN}", method="HEAD")[2] == ""


@pytest.mark.parametrize("query", ["", "?token=", f"?token={TOKEN}x", f"?token={TOKEN[:-1]}"])
def test_without_the_token_it_refuses(served: tuple[Path, int], query: str):
    said = {"error": "the token is missing or wrong; open the address that was printed"}
    for path in ("/", "/api/run", "/api/events", "/nothing"):
        status, headers, answer = ask(served[1], path + query)
        assert (status, answer) == (403, said), path
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"Host": "evil.example"}, "answers to its own address only"),
        ({"Host": "192.0.2.7"}, "answers to its own address only"),
        ({"Host": "127.0.0.1.evil.example"}, "answers to its own address only"),
        ({"Host": ""}, "answers to its own address only"),
        ({"Host": "[::"}, "answers to its own address only"),
        ({"Origin": "https://evil.example"}, "may not read this board"),
        ({"Host": "evil@127.0.0.1"}, "answers to its own address only"),
        ({"Host": "2130706433"}, "answers to its own address only"),
        ({"Origin": "null"}, "may not read this board"),
        ({"Origin": "http://[::"}, "may not read this board"),
        ({"Origin": "http://127.0.0.1:1"}, "may not read this board"),
        ({"Sec_Fetch_Site": "cross-site"}, "another site"),
        ({"Sec_Fetch_Site": "same-site"}, "another site"),
    ],
)
def test_other_sites_are_refused(served: tuple[Path, int], headers: dict[str, str], why: str):
    for path in ("/api/run", "/api/events", "/"):
        status, _, answer = ask(served[1], f"{path}?token={TOKEN}", **headers)
        assert status == 403
        assert why in answer["error"]


def test_a_board_for_others_is_reached_by_addresses_alone(tmp_path: Path):
    """A site that points its own name at this machine does not get through."""
    own = socket.gethostname()
    with board_here(tmp_path, host="0.0.0.0") as board:
        for host, status in (("evil.example", 403), ("192.0.2.7:80", 200), (own, 200)):
            assert ask(board.port, f"/api/run?token={TOKEN}", Host=host)[0] == status
        assert ask(board.port, "/api/run", Host="192.0.2.7")[0] == 403


def test_it_only_reads(served: tuple[Path, int]):
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        status, _, answer = ask(served[1], f"/?token={TOKEN}", method=method)
        assert (status, answer) == (405, {"error": "a board answers GET and HEAD only"}), method


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "../secret/step_00000009",
        "step_00000001/../../secret/step_00000009",
        "%2e%2e%2fsecret%2fstep_00000009",
        "..%2fsecret%2fstep_00000009",
        "/etc/passwd",
        "/",
        "",
        ".",
        "file:///etc",
        "s3://bucket/runs",
        "memory://x",
        "step_00000001%00",
        "step_00000001/",
        "{root}/../secret/step_00000009",
        "step_00000099",
    ],
)
@pytest.mark.parametrize(
    "route", ["checkpoint?path=", "leaf?leaf=a&path=", "compare?b=step_00000001&a="]
)
def test_no_other_path_is_opened(served: tuple[Path, int], route: str, path: str):
    root, port = served
    wanted = path.format(root=root)
    status, _, answer = ask(port, f"/api/{route}{wanted}&token={TOKEN}")
    assert status == 404
    assert f"is no step of {root}" in answer["error"]


def test_nothing_behind_a_link_is_shown(served: tuple[Path, int]):
    root, port = served
    for path in ("step_00000009", f"{root}/step_00000009"):
        status, _, answer = ask(port, f"/api/checkpoint?path={path}&token={TOKEN}")
        assert status == 403
        assert "shows nothing behind links" in answer["error"]


def test_there_are_no_other_pages(served: tuple[Path, int]):
    for path in ("/etc/passwd", "/../../etc/passwd", "/api/", "/api/run/x", "/static"):
        status, _, answer = ask(served[1], f"{path}?token={TOKEN}")
        assert status == 404, path
        assert "has no page" in answer["error"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + b"X-A: 1\r\n" * 80 + b"\r\n", 431),
        (b"\x00\xff\r\n\r\n", 400),
        (b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n", 400),
        (b"GET http://[:: HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n", 403),
        (b"GET / HTTP/9.9\r\n\r\n", 505),
    ],
)
def test_requests_that_no_browser_sends(served: tuple[Path, int], sent: bytes, status: int):
    with socket.create_connection(("127.0.0.1", served[1]), timeout=60) as connection:
        connection.sendall(sent)
        answer = connection.makefile("rb").read(12)
    assert answer == f"HTTP/1.1 {status}".encode()
    assert ask(served[1], f"/api/run?token={TOKEN}")[0] == 200


def test_connections_that_say_nothing_keep_nobody_out(served: tuple[Path, int]):
    _, port = served
    listener = Listener(port)
    listener.next()
    silent = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(200)]
    for connection in silent[::2]:
        with suppress(OSError):  # Closed, since others came.
            connection.sendall(b"GET / HTTP/1.1\r\nHost: 127")
    assert [ask(port, f"/api/run?token={TOKEN}")[0] for _ in range(10)] == [200] * 10
    # Who has the token is not closed for them.
    pin = served[0] / "step_00000002" / "_PINNED"
    pin.touch()
    assert [row["step"] for row in listener.next()[1]["steps"]] == [2]
    pin.unlink()
    for connection in (listener, *silent):
        connection.close()


def test_a_step_that_can_not_be_described_is_one_sentence(served: tuple[Path, int]):
    """Whatever the parts of the report raise, the answer is JSON and the server goes on."""
    for path in ("checkpoint?path=step_00000001", "leaf?path=step_00000001&leaf=nothing"):
        status, _, answer = ask(served[1], f"/api/{path}&token={TOKEN}")
        assert status in (200, 404, 500)
        assert status == 200 or "\n" not in answer["error"]


def test_the_command(tmp_path: Path):
    fill(tmp_path / "run", 1)
    assert "a token has 16 to 200" in run("board", tmp_path / "run", "--token", "short").stderr
    step = tmp_path / "run" / "step_00000001"
    assert "is a checkpoint, not a directory of steps" in run("board", step).stderr
    (tmp_path / "file").touch()
    assert "is a file; give a directory of steps" in run("board", tmp_path / "file").stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        why = f"can't listen on 127.0.0.1:{port}: the port is in use; choose another"
        assert why in run("board", tmp_path / "run", "--port", port).stderr
    with board_of(tmp_path / "run", token=None) as (process, port):
        assert ask(port, f"/?token={TOKEN}")[0] == 403
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


# Events


class Listener:
    """Reads the events of a board."""

    def __init__(self, port: int):
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        request = f"GET /api/events?token={TOKEN} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        self._socket.sendall(request.encode())
        self._file = self._socket.makefile("rb")
        self.status = int(self._file.readline().split()[1])

    def next(self) -> tuple[str, Any]:
        name = ""
        while line := self._file.readline().decode():
            if line.startswith("event: "):
                name = line[7:].strip()
            elif line.startswith("data: ") and name != "beat":
                return name, json.loads(line[6:])
        raise EOFError

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def test_events_tell_what_has_changed(tmp_path: Path):
    with board_of(tmp_path / "run") as (_, port):
        listener = Listener(port)
        name, found = listener.next()
        assert (name, found["steps"]) == ("run", [])
        fill(tmp_path / "run", 1, 2)
        seen: set[int] = set()
        while seen != {1, 2}:
            name, found = listener.next()
            seen |= {row["step"] for row in found["steps"]}
        ostraka.annotate(tmp_path / "run" / "1", pinned=True)
        while True:
            name, found = listener.next()
            if found["steps"]:
                break
        assert name == "change"
        assert [(row["step"], row["pinned"]) for row in found["steps"]] == [(1, True)]
        shutil.rmtree(next((tmp_path / "run" / "step_00000002").glob("shards-*")))
        _, found = listener.next()
        assert [(row["step"], row["state"]) for row in found["steps"]] == [(2, "damaged")]
        shutil.rmtree(tmp_path / "run" / "step_00000002")
        _, found = listener.next()
        assert found["gone"] == [2]
        listener.close()


def test_events_tell_of_a_directory_that_is_replaced(tmp_path: Path):
    root = tmp_path / "run"
    fill(root, 1, 2)
    with board_of(root) as (_, port):
        listener = Listener(port)
        before = listener.next()[1]["steps"]
        shutil.rmtree(root)
        found = listener.next()[1]
        while found.get("gone") not in ([1, 2], [2]):
            found = listener.next()[1]
        root.touch()  # A file, for a while.
        root.unlink()
        fill(root, 2, 3)
        seen: dict[int, Any] = {}
        while seen.keys() != {2, 3}:
            seen |= {row["step"]: row for row in listener.next()[1]["steps"]}
        assert seen[2]["saved_at"] > before[1]["saved_at"]
        listener.close()


def test_a_check_that_nobody_waits_for_ends(tmp_path: Path):
    fill(tmp_path, 1)
    gate = Gate("read_into", ".safetensors")
    with board_here(FaultyStore(tmp_path, before=gate)) as board:
        connection = http.client.HTTPConnection("127.0.0.1", board.port, timeout=60)
        connection.request("GET", f"/api/verify?path=step_00000001&token={TOKEN}")
        gate.wait_until_reached()
        connection.close()
        gate.open()
        wait_until(lambda: not any("process_request" in one.name for one in threading.enumerate()))
        assert board.feed.look()["steps"][0]["state"] == "committed"
        assert ask(board.port, f"/api/verify?path=step_00000001&token={TOKEN}")[0] == 200
        assert board.feed.look()["steps"][0]["state"] == "verified"


def test_changes_lead_from_one_document_to_the_next(tmp_path: Path):
    fill(tmp_path, 1, 2, 3)
    before = describe_run(tmp_path)
    fill(tmp_path, 4, keep=2)
    now = describe_run(tmp_path)
    found = find_changes(before, now)
    kept = {row["step"]: row for row in before["steps"] if row["step"] not in found["gone"]}
    kept |= {row["step"]: row for row in found["steps"]}
    assert [kept[step] for step in sorted(kept)] == now["steps"]
    assert find_changes(now, now)["steps"] == []


@pytest.mark.parametrize(
    ("steps", "changes"), [(2, 4), pytest.param(1000, 100, marks=pytest.mark.soak)]
)
def test_pages_that_come_and_go_leave_nothing(tmp_path: Path, steps: int, changes: int):
    """Memory and open files stay flat over changes while pages reconnect."""
    fill(tmp_path, *range(1, steps + 1))
    pin = tmp_path / "step_00000001" / "_PINNED"

    def change(listeners: list[Listener]) -> None:
        pin.unlink() if pin.exists() else pin.touch()
        for listener in listeners:
            while not listener.next()[1]["steps"]:
                pass

    with board_of(tmp_path) as (process, port):
        listeners = [Listener(port) for _ in range(4)]
        for listener in listeners:
            listener.next()

        def measure() -> tuple[int, int]:
            files = len(os.listdir(f"/proc/{process.pid}/fd"))
            status = Path(f"/proc/{process.pid}/status").read_text()
            return files, int(status.partition("VmRSS:")[2].split()[0])

        for _ in range(4):
            change(listeners)
        files, kib = measure()
        for _ in range(changes):
            change(listeners)
            listeners.pop(0).close()
            listeners.append(Listener(port))
            listeners[-1].next()
        wait_until(lambda: measure()[0] <= files)  # It notices within a second that one has left.
        assert measure()[1] < kib + 4096 + 8 * steps  # KiB, for a document sent to each page
        others = [Listener(port) for _ in range(16)]
        assert [one.status for one in others].count(503) == 4
        for listener in (*listeners, *others):
            listener.close()
        wait_until(lambda: measure()[0] < files)


# In a browser


def shown(browser: Any) -> list[int]:
    cells = "[...document.querySelectorAll('#table tbody tr td:first-child')]"
    return sorted(browser.run(f"return {cells}.map((cell) => Number(cell.textContent))"))


def wait_for_steps(browser: Any, *steps: int) -> None:
    wanted = json.dumps([f"{step}" for step in sorted(steps, reverse=True)])
    cells = "[...document.querySelectorAll('#table tbody tr td:first-child')]"
    condition = f"JSON.stringify({cells}.map((cell) => cell.textContent)) === arguments[0]"
    wait_in_page(browser, condition, wanted.replace(" ", ""))


def state_of(step: int) -> str:
    rows = "[...document.querySelectorAll('#table tbody tr')]"
    return f"{rows}.find((row) => row.cells[0].textContent === '{step}')?.cells[1].textContent"


def test_a_board_while_a_run_goes_on(browser: Any, tmp_path: Path):
    root = tmp_path / "run"
    training = subprocess.Popen(
        [sys.executable, "-c", TRAIN, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def train(*steps: int) -> None:
        assert training.stdin is not None
        assert training.stdout is not None
        for step in steps:
            print(step, file=training.stdin, flush=True)
            assert training.stdout.readline() == "saved\n"

    with training, board_of(root) as (first, port):
        own = f"http://127.0.0.1:{port}/"
        browser.open(f"{own}?token={TOKEN}")
        wait_in_page(browser, "document.getElementById('live').textContent === 'live'")
        train(1, 2)
        wait_for_steps(browser, 1, 2)
        browser.run("document.getElementById('theme').click(); window.mark = 1;")
        browser.run("document.querySelector('#table .scroll').focus()")
        latencies: list[float] = []
        for step in (3, 4):
            train(step)
            committed_s = (root / f"step_{step:08d}" / "_METADATA").stat().st_mtime
            wait_in_page(browser, f"{state_of(step)}?.startsWith('committed')")
            latencies.append(time.time() - committed_s)
        print("seconds from commit to page:", [round(one, 2) for one in latencies])
        # The oldest step goes, and nothing of the page is lost.
        train(5)
        wait_for_steps(browser, 2, 3, 4, 5)
        wait_in_page(browser, f"{state_of(2)}.includes('goes next')")
        assert browser.run("return document.activeElement.classList.contains('scroll')")
        assert browser.run("return document.documentElement.dataset.theme") == "light"
        ostraka.annotate(root / "3", pinned=True)
        wait_in_page(browser, f"{state_of(3)}.includes('pinned')")
        shutil.rmtree(next((root / "step_00000004").glob("shards-*")))
        wait_in_page(browser, f"{state_of(4)}.includes('damaged')")
        wait_in_page(browser, "document.querySelectorAll('#steps .mark.damaged').length > 0")
        assert complaints(browser, own=own) == []
        # A step has an address of its own, and the way back leads to the run.
        browser.run("document.querySelector('#table tbody tr').click()")
        wait_in_page(
            browser, "location.hash.startsWith('#step/') && document.querySelector('.way')"
        )
        browser.run("history.back()")
        wait_for_steps(browser, 2, 3, 4, 5)
        first.kill()
        first.wait()
        wait_in_page(browser, "document.getElementById('live').textContent === 'reconnecting …'")
        train(6)
        with board_of(root, "--port", str(port)) as (second, _):
            wait_in_page(browser, "document.getElementById('live').textContent === 'live'")
            wait_in_page(browser, f"{state_of(6)}?.startsWith('committed')")
            # A connection that is open, but silent for too long by the clock of the page.
            second.send_signal(signal.SIGSTOP)
            browser.run("const now = Date.now; Date.now = () => now() + 20000")
            wait_in_page(
                browser, "document.getElementById('live').textContent === 'reconnecting …'"
            )
            second.send_signal(signal.SIGCONT)
            wait_in_page(browser, "document.getElementById('live').textContent === 'live'")
        with board_of(root, "--port", str(port), token=None):
            restarted = "document.getElementById('live').textContent.startsWith('restarted')"
            wait_in_page(browser, restarted)
        assert browser.run("return window.mark") == 1
        assert training.stdin is not None
        training.stdin.close()
        assert training.wait(60) == 0


def test_a_check_of_all_bytes(browser: Any, tmp_path: Path):
    root = tmp_path / "run"
    fill(root, 1, 2)
    with board_of(root) as (_, port):
        own = f"http://127.0.0.1:{port}/"
        browser.open("about:blank")
        complaints(browser, own="")

        def check() -> str:
            open_page(browser, f"{own}?token={TOKEN}#step/step_00000002")
            wait_in_page(browser, "document.getElementById('verify')")
            click(browser, "#verify")
            wait_in_page(browser, "document.getElementById('verify') === null")
            browser.run("location.hash = ''")
            return wait_in_page(browser, f"!{state_of(2)}.startsWith('committed') && {state_of(2)}")

        assert check().startswith("verified")
        ostraka.annotate(root / "2", pinned=True)
        wait_in_page(browser, f"{state_of(2)}.includes('pinned')")
        assert browser.run(f"return {state_of(2)}").startswith("verified")
        damage(root, 2)
        wait_in_page(browser, f"{state_of(2)}.startsWith('committed')")
        browser.open("about:blank")
        assert check().startswith("damaged")
        assert browser.run(f"return {state_of(1)}").startswith("committed")
        open_page(browser, f"{own}?token={TOKEN}#step/step_00000002")
        shutil.rmtree(root / "step_00000002")
        wait_in_page(browser, "document.getElementById('deleted')")
        assert complaints(browser, own=own) == []


def test_more_tabs_than_a_browser_has_connections(browser: Any, tmp_path: Path):
    with board_of(tmp_path) as (_, port):
        url = f"http://127.0.0.1:{port}/?token={TOKEN}"
        tabs = [browser.command("Target.createTarget", {"url": url}) for _ in range(7)]
        browser.command("Page.bringToFront", {})
        open_page(browser, url)
        wait_in_page(browser, "document.getElementById('live').textContent === 'live'")
        for tab in tabs:
            browser.command("Target.closeTarget", tab)


def test_a_board_without_a_run_yet(browser: Any, tmp_path: Path):
    browser.open("about:blank")
    complaints(browser, own="")  # forget those of the page before, whose board has ended
    with board_of(tmp_path / "none") as (_, port):
        open_page(browser, f"http://127.0.0.1:{port}/?token={TOKEN}")
        text = "document.getElementById('page').textContent.includes('No step is here yet')"
        wait_in_page(browser, text)
        assert complaints(browser, own=f"http://127.0.0.1:{port}/") == []
