"""Eight CPU devices for every test, on any machine.

JAX reads these variables when it is first imported and when it first looks for devices, so they are
set here, before any test module is collected. Nothing on this page imports JAX.
"""

import os

from hypothesis import HealthCheck, settings

_DEVICES = "--xla_force_host_platform_device_count"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICES)]
    + [f"{_DEVICES}=8"]
)

# Two test processes share two cores, and a first call compiles: time says nothing about a
# property. In CI the examples are the same in every run.
settings.register_profile(
    "ostraka",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ostraka")
