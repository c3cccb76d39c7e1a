"""`ostraka doctor`: versions, devices, credentials, and storage that works or does not."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import jax
import pytest

import ostraka
from cli_runs import run
from ostraka.cli import _doctor_storage
from ostraka.cli._doctor_storage import check_storage
from ostraka.storage import open_store
from places import Place


def checks_of(*arguments: object, **environment: str | None) -> dict[str, dict[str, Any]]:
    document = json.loads(run("doctor", *arguments, "--json", **environment).stdout)
    assert document["ok"] is all(check["state"] != "fault" for check in document["checks"])
    return {check["name"]: check for check in document["checks"]}


@pytest.fixture
def known_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody imports JAX to look for them."""
    monkeypatch.setattr("ostraka.cli._doctor._DEVICES", "print('[2, {\"tpu v7\": 8}]')")


@pytest.mark.usefixtures("known_devices")
def test_all_is_well(tmp_path: Path):
    result = run("doctor", tmp_path, COLUMNS="80")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith("\nall is well\n")
    assert "8 × tpu v7 in 2 processes" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_what_is_told_of_this_machine(tmp_path: Path):
    checks = checks_of(tmp_path)
    assert checks["python"]["found"].startswith(platform.python_version())
    assert checks["ostraka"]["found"].startswith(ostraka.__version__)
    assert checks["jax"]["found"] == jax.__version__
    assert {"flax", "obstore", "zstandard", "tensorstore"} <= checks.keys()
    assert "8 × cpu" in checks["jax.devices()"]["found"]
    for name in ("exclusive create", "atomic rename", "fsync", "hard links", "flock"):
        assert (checks[name]["state"], checks[name]["found"]) == ("ok", "works"), name
    assert checks["free space"]["found"].endswith("iB")
    assert checks["clock"]["state"] == "ok"
    assert os.listdir(tmp_path) == []


def test_a_path_that_does_not_exist_yet(tmp_path: Path):
    found = {check.name: check for check in check_storage(str(tmp_path / "a" / "b"), 60)}
    assert found["write"].found.startswith(f"{tmp_path}, the first that exists above ")
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("known_devices")
def test_a_file_is_no_directory(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    result = run("doctor", tmp_path / "file")
    assert result.exit_code == 1
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("fault"))
    assert f"{tmp_path}/file is a file; give a directory" in line
    assert result.stdout.endswith("\n1 fault\n")


def test_devices_that_do_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ostraka.cli._doctor._DEVICES", "import time; time.sleep(600)")
    result = run("doctor", tmp_path, "--timeout", "2", "--json")
    assert result.exit_code == 1
    (fault,) = (c for c in json.loads(result.stdout)["checks"] if c["state"] == "fault")
    assert (fault["name"], fault["found"]) == ("jax.devices()", "no answer within 2 s")


def test_devices_that_fail(tmp_path: Path):
    checks = checks_of(tmp_path, JAX_PLATFORMS="no_such_platform")
    assert checks["jax.devices()"]["state"] == "fault"
    assert "no_such_platform" in checks["jax.devices()"]["found"]


@pytest.mark.usefixtures("known_devices")
def test_credentials_are_named_and_not_shown(tmp_path: Path):
    secret = "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"
    given = {"AWS_ACCESS_KEY_ID": secret, "AWS_SECRET_ACCESS_KEY": secret, "HOME": str(tmp_path)}
    result = run("doctor", tmp_path, **given)
    assert secret not in result.stdout
    assert "found in AWS_ACCESS_KEY_ID" in result.stdout
    gcloud = tmp_path / ".config" / "gcloud" / "application_default_credentials.json"
    gcloud.parent.mkdir(parents=True)
    gcloud.write_text(secret)
    checks = checks_of(tmp_path, **given, AZURE_STORAGE_ACCOUNT_KEY=None)
    assert checks["gs://"]["found"] == f"found in ~/.config/gcloud/{gcloud.name}"
    assert (checks["az://"]["state"], checks["s3://"]["state"]) == ("note", "ok")


def test_storage_of_every_kind(place: Place):
    (place / "runs").mkdir(exist_ok=True) if isinstance(place, Path) else None
    found = {check.name: check for check in check_storage(str(place / "runs"), 120)}
    assert all(check.state == "ok" for check in found.values()), found
    assert {"write", "exclusive create", "clock"} <= found.keys()
    assert open_store(str(place / "runs")).list() == []


@pytest.mark.usefixtures("known_devices")
def test_a_bucket_that_is_not_there(bucket: Place):
    checks = checks_of("s3://no-such-bucket-for-the-doctor/runs")
    assert checks["access"]["state"] == "fault"
    assert "no-such-bucket-for-the-doctor" in checks["access"]["found"]


def test_what_does_not_work_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(_doctor_storage.os, "replace", refuse)
    monkeypatch.setattr(_doctor_storage.os, "link", refuse)
    monkeypatch.setattr(_doctor_storage.time, "time", lambda: 4e9)
    found = {check.name: check for check in check_storage(str(tmp_path), 60)}
    assert (found["atomic rename"].state, found["atomic rename"].found) == (
        "fault",
        "Operation not supported",
    )
    assert found["hard links"].state == "note"
    assert found["clock"].state == "fault"
    assert "ahead of the storage" in found["clock"].found
    assert os.listdir(tmp_path) == []


def test_a_directory_where_nobody_may_write(tmp_path: Path):
    (found,) = check_storage("/proc", 60)
    assert (found.name, found.state) == ("write", "fault")
    assert found.found.startswith("/proc: ")
