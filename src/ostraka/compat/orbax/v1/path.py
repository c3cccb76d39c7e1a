"""Paths of v1."""

from ostraka.compat.orbax._refuse import refuse
from ostraka.compat.orbax.path import step as step

__getattr__ = refuse(__name__)
