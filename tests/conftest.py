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
# property. The examples are the same in every run, so that none fails by chance, nor hides behind
# it; OSTRAKA_NEW_EXAMPLES=1 makes others.
settings.register_profile(
    "ostraka",
    deadline=None,
    derandomize="OSTRAKA_NEW_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ostraka")
