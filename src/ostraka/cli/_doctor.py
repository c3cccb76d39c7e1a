"""`ostraka doctor`: is this machine, and the storage at a path, fit for checkpoints?

JAX is asked for its devices in a process of its own, which is ended if it does not answer.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import click

from ostraka._version import __version__
from ostraka.cli._arguments import json_option, option, path_argument
from ostraka.cli._doctor_storage import Check, check_storage
from ostraka.cli._output import echo_json, echo_lines, screen_width
from ostraka.errors import count_of, printable, without_secrets

_FAULT = 1
_COLOURS = {"ok": None, "note": "yellow", "fault": "red"}
_DEVICES = """
import json, jax
found = {}
for device in jax.devices():
    kind = " ".join(dict.fromkeys([device.platform, device.device_kind]))
    found[kind] = found.get(kind, 0) + 1
print(json.dumps([jax.process_count(), found]))
"""
_REQUIREMENT = re.compile(r"([\w.-]+)[^>=;]*(?:>=([\w.]+))?[^;]*(?:;.*extra == ['\"](\w+)['\"])?")
_CREDENTIALS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "s3": (
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        (
            "AWS_ACCESS_KEY_ID",
            "AWS_PROFILE",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_SKIP_SIGNATURE",
        ),
        ("~/.aws/credentials", "~/.aws/config"),
    ),
    "gs": (
        "GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login",
        (
            "GOOGLE_APPLICATION_CREDENTIALS",
            "GOOGLE_SERVICE_ACCOUNT",
            "GOOGLE_SERVICE_ACCOUNT_PATH",
            "GOOGLE_SERVICE_ACCOUNT_KEY",
            "GOOGLE_SKIP_SIGNATURE",
        ),
        ("~/.config/gcloud/application_default_credentials.json",),
    ),
    "az": (
        "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
        (
            "AZURE_STORAGE_ACCOUNT_KEY",
            "AZURE_STORAGE_ACCESS_KEY",
            "AZURE_STORAGE_SAS_TOKEN",
            "AZURE_STORAGE_SAS_KEY",
            "AZURE_CLIENT_SECRET",
            "AZURE_FEDERATED_TOKEN_FILE",
            "AZURE_USE_AZURE_CLI",
            "AZURE_SKIP_SIGNATURE",
        ),
        (),
    ),
}
"""By scheme: the advice, the variables and the files in which credentials are found."""
_SCHEMES = {"s3a": "s3", "azure": "az", "abfs": "az", "abfss": "az"}


@click.command()
@path_argument("path", required=False, default=".")
@option(
    "--timeout timeout_s",
    click.FloatRange(0, min_open=True),
    "How long to wait for the devices, and for the storage.",
    default=60.0,
    show_default=True,
    metavar="SECONDS",
)
@json_option("Print the checks as JSON.")
@click.pass_context
def doctor(context: click.Context, path: str, timeout_s: float, as_json: bool) -> None:
    """Check this machine, and the storage at PATH.

    It shows the versions of all packages that Ostraka uses, the devices that JAX finds, and where
    it finds credentials of stores. It never prints a credential. In PATH (default: the current
    directory) it writes a few small files and removes them again, to try everything that a save
    needs: exclusive creation, atomic renames, fsync, locks, hard links. It shows the free space,
    and how far the clock of the storage is from the clock of this machine.

    The exit code is 1 if something does not work. Such lines say fault, and what to do. Lines that
    say note are for your information.

    \b
    Examples:
      ostraka doctor
      ostraka doctor /mnt/runs
      ostraka doctor s3://bucket/runs
      ostraka doctor /mnt/runs --json | jq '.checks[] | select(.state == "fault")'
    """
    found = [
        *_packages(),
        *_devices(timeout_s),
        *_credentials(path),
        *check_storage(path, timeout_s),
    ]
    faults = sum(check.state == "fault" for check in found)
    if as_json:
        echo_json({"ok": not faults, "path": path, "checks": [asdict(check) for check in found]})
    else:
        echo_lines([*_lines(found), "", _summary(faults)])
    if faults:
        context.exit(_FAULT)


def _lines(found: list[Check]) -> Iterator[str]:
    """A line for each check, under the name of its group. Long ones are wrapped to the screen."""
    width, longest = screen_width() or sys.maxsize, max(len(check.name) for check in found)
    above = None
    for check in found:
        if check.group != above:
            yield from [""] * (above is not None)
            yield click.style(check.group, bold=True)
        above = check.group
        text = check.found if check.advice is None else f"{check.found}; {check.advice}"
        head = f"{check.state:5}  {check.name:{longest}}  "
        for line in textwrap.wrap(printable(text), max(width - len(head), 20)) or [""]:
            yield click.style(f"{head}{line}", fg=_COLOURS[check.state])
            head = " " * len(head)


def _summary(faults: int) -> str:
    if faults:
        return click.style(count_of(faults, "fault"), fg="red")
    return click.style("all is well", fg="green")


# Packages


def _packages() -> Iterator[Check]:
    """The versions of Python, of Ostraka, and of all that it requires or can use."""
    group = "packages"
    yield Check(group, "python", "ok", f"{platform.python_version()} on {platform.platform()}")
    yield Check(group, "ostraka", "ok", f"{__version__} in {Path(__file__).parents[1]}")
    for name, least, extra in _requirements():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            remedy = f"pip install {f'ostraka[{extra}]' if extra else name!r}"
            state, found = ("note", "not installed") if extra else ("fault", "not installed")
            yield Check(group, name, state, found, f"to use it, run {remedy}")
            continue
        if least is not None and _numbers(version) < _numbers(least):
            advice = f"Ostraka needs {least} or newer: pip install -U {name}"
            yield Check(group, name, "fault", version, advice)
        else:
            yield Check(group, name, "ok", version)


def _requirements() -> Iterator[tuple[str, str | None, str | None]]:
    """The name, the lowest version and the extra of each package that Ostraka can use."""
    try:
        listed = metadata.requires("ostraka") or []
    except metadata.PackageNotFoundError:  # It runs from its source.
        return
    for text in listed:
        found = _REQUIREMENT.match(text)
        if found is not None and found[1] != "ostraka" and found[3] not in ("all", "dev"):
            yield found[1], found[2], found[3]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


# Devices


def _devices(timeout_s: float) -> Iterator[Check]:
    group, name = "devices", "jax.devices()"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DEVICES],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        advice = "another program may hold them, or a driver hangs; --timeout waits longer"
        yield Check(group, name, "fault", f"no answer within {timeout_s:g} s", advice)
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        advice = "import jax and call jax.devices() yourself to see more"
        yield Check(group, name, "fault", without_secrets(last), advice)
        return
    processes, devices = json.loads(done.stdout.strip().splitlines()[-1])
    shown = ", ".join(f"{count} × {kind}" for kind, count in devices.items())
    yield Check(group, name, "ok", shown + (f" in {processes} processes" if processes > 1 else ""))


# Credentials


def _credentials(path: str) -> Iterator[Check]:
    """Where credentials are found. Their values are read by nobody here."""
    scheme, separator, _ = path.partition("://")
    wanted = _SCHEMES.get(scheme, scheme) if separator else None
    for name, (advice, variables, files) in _CREDENTIALS.items():
        if wanted in _CREDENTIALS and name != wanted:
            continue
        places = [variable for variable in variables if os.environ.get(variable)]
        places += [file for file in files if Path(file).expanduser().is_file()]
        if places:
            yield Check("credentials", f"{name}://", "ok", f"found in {', '.join(places)}")
        else:
            found = "not found in the environment and in files"
            remedy = f"set {advice}" if name == wanted else None
            yield Check("credentials", f"{name}://", "note", found, remedy)
