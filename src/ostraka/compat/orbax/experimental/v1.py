"""v1 under its older name: importing this gives `ostraka.compat.orbax.v1` itself."""

import sys

from ostraka.compat.orbax import v1

sys.modules[__name__] = v1
