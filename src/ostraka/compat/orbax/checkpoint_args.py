"""The registry of args, under its older name."""

from ostraka.compat.orbax._refuse import refuse
from ostraka.compat.orbax.args import CheckpointArgs as CheckpointArgs
from ostraka.compat.orbax.args import get_registered_args_cls as get_registered_args_cls
from ostraka.compat.orbax.args import get_registered_handler_cls as get_registered_handler_cls
from ostraka.compat.orbax.args import has_registered_args as has_registered_args
from ostraka.compat.orbax.args import register_with_handler as register_with_handler

__getattr__ = refuse(__name__)
