"""Eight CPU devices for every test, on any machine.

JAX reads these variables when it is first imported and when it first looks for devices, so they are
set here, before any test module is collected. Nothing on this page imports JAX.
"""

import gc
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from compiled import compiled_in
from figures import FiguresPlugin
from figures import figures as figures
from ostraka.testing import preloaded
from places import BucketPath, Place
from servers import KINDS, Server
from times import TimesPlugin

_DEVICES = "--xla_force_host_platform_device_count"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICES)]
    + [f"{_DEVICES}=8"]
)

# A shell that starts the suite in the background makes it ignore Ctrl-C. Tests send it to programs.
signal.signal(signal.SIGINT, signal.default_int_handler)

# pytest-xdist tells its workers the width of the screen. The command would fit its lines to it.
os.environ.pop("COLUMNS", None)

# Tests start hundreds of programs, each of which would else compile the same Python files anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Most programs run once: compiling them well would take longer than running them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# Two test processes share two cores, and a first call compiles: time says nothing about a
# property. The examples are the same in every run, so that none fails by chance, nor hides behind
# it; OSTRAKA_NEW_EXAMPLES=1 makes others.
settings.register_profile(
    "ostraka",
    deadline=None,
    derandomize="OSTRAKA_NEW_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ostraka")


def pytest_configure(config: pytest.Config) -> None:
    """OSTRAKA_FIGURES names the file for what soak tests count (`make soak`)."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(TimesPlugin())
    file = os.environ.get("OSTRAKA_FIGURES")
    config.pluginmanager.register(FiguresPlugin(Path(file) if file else None))


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The directory of what the tests of a module have compiled: `compiled_in`."""
    directory = tmp_path_factory.mktemp("compiled")
    with compiled_in(directory):
        yield str(directory)


_LONG_IN_BUCKETS = {
    "test_async",
    "test_errors",
    "test_kill",
    "test_lazy",
    "test_leftovers",
    "test_manager_processes",
}
_IN_THE_SUITE = 8
_STORE = os.environ.get("OSTRAKA_TEST_STORE", "moto")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most of what takes long in a bucket to `make buckets`: all of it does not fit.

    The suite has every eighth test function of each of these modules in a bucket, too, with the
    first of its parameters.
    """
    functions: dict[str, list[str]] = {}
    kept: set[tuple[str, str]] = set()
    for item in items:
        module, name = item.path.stem, getattr(item, "originalname", item.name)
        params = getattr(getattr(item, "callspec", None), "params", {})
        kinds = {params.get(fixture) for fixture in ("place", "new_place")}
        if module not in _LONG_IN_BUCKETS or "bucket" not in kinds:
            continue
        known = functions.setdefault(module, [])
        if name not in known:
            known.append(name)
        if known.index(name) % _IN_THE_SUITE or (module, name) in kept:
            item.add_marker(pytest.mark.buckets)
        elif item.get_closest_marker("soak") is None:
            kept.add((module, name))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Have no test look for garbage among all that was imported: it took a third of a fuzzing."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """Object stores by name, each started when it is first asked for."""
    with ExitStack() as running:
        started: dict[str, Server] = {}

        def start(name: str) -> Server:
            if name not in started:
                directory = tmp_path_factory.mktemp(name)
                started[name] = running.enter_context(KINDS[name](directory))
            return started[name]

        yield start


@pytest.fixture
def bucket(
    request: pytest.FixtureRequest,
    servers: Callable[[str], Server],
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """A prefix of its own in a bucket, of the store that the test names by `param`.

    By default it is moto's, or that of OSTRAKA_TEST_STORE (`make buckets STORE=google`).
    """
    server = servers(getattr(request, "param", _STORE))
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"{server.url}/{uuid.uuid4().hex}"


@pytest.fixture(params=["disk", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where a test may save what it likes: a directory, then a bucket."""
    if request.param == "disk":
        return tmp_path
    return BucketPath(request.getfixturevalue("bucket"))


@pytest.fixture(scope="module")
def new_bucket(servers: Callable[[str], Server]) -> Iterator[Callable[[str], BucketPath]]:
    """For what the tests of a module share: makes a place in a server, by the server's name.

    The server that was named last is the one that is asked.
    """
    with pytest.MonkeyPatch.context() as patch:

        def make(name: str) -> BucketPath:
            server = servers(name)
            for variable, value in server.environment.items():
                patch.setenv(variable, value)
            return BucketPath(f"{server.url}/{uuid.uuid4().hex}")

        yield make


@pytest.fixture(scope="module", params=["disk", "bucket"])
def new_place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Place]:
    """The same for both kinds of `place`."""
    if request.param == "disk":
        return tmp_path_factory.mktemp
    make = request.getfixturevalue("new_bucket")
    return lambda name: make(_STORE)


@pytest.fixture(scope="session", autouse=True)
def _preloaded() -> Iterator[None]:
    """To import JAX and Flax in each of its processes would be most of what many a test does."""
    modules = ["jax", "flax.nnx", "optax", "hypothesis", "pytest", "obstore", "safetensors"]
    modules += ["jax.experimental.multihost_utils", "jaxlib.mlir.dialects.builtin"]
    # Those of Ostraka that a process would import when it first saves, restores or verifies.
    modules += ["ostraka.manager._manager", "ostraka.integrity", "ostraka.formats.ostraka._fetch"]
    with preloaded(*modules):
        yield
