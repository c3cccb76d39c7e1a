"""Where steps lie."""

from ostraka.compat.orbax._refuse import refuse
from ostraka.compat.orbax.path import atomicity as atomicity
from ostraka.compat.orbax.path import step as step

__getattr__ = refuse(__name__)
