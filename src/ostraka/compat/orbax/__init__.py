"""Orbax's names over Ostraka: `import ostraka.compat.orbax as ocp`.

Programs for `orbax.checkpoint` run with that line changed, and save Ostraka checkpoints. Steps
that Orbax wrote are listed, restored and retained too. Unsupported names and options raise an error
that names them. docs/migrating.md has the list.
"""

from ostraka.compat.orbax import args as args
from ostraka.compat.orbax import checkpoint_manager as checkpoint_manager
from ostraka.compat.orbax import checkpoint_managers as checkpoint_managers
from ostraka.compat.orbax import checkpoint_utils as checkpoint_utils
from ostraka.compat.orbax import checkpointers as checkpointers
from ostraka.compat.orbax import future as future
from ostraka.compat.orbax import handlers as handlers
from ostraka.compat.orbax import logging as logging
from ostraka.compat.orbax import metadata as metadata
from ostraka.compat.orbax import multihost as multihost
from ostraka.compat.orbax import options as options
from ostraka.compat.orbax import path as path
from ostraka.compat.orbax import test_utils as test_utils
from ostraka.compat.orbax import transform_utils as transform_utils
from ostraka.compat.orbax import tree as tree
from ostraka.compat.orbax import type_handlers as type_handlers
from ostraka.compat.orbax import utils as utils
from ostraka.compat.orbax import v1 as v1
from ostraka.compat.orbax._aliases import install as _install
from ostraka.compat.orbax._leaves import PLACEHOLDER as PLACEHOLDER
from ostraka.compat.orbax._refuse import refuse as _refuse
from ostraka.compat.orbax.checkpoint_manager import (
    AbstractCheckpointManager as AbstractCheckpointManager,
)
from ostraka.compat.orbax.checkpoint_manager import CheckpointManager as CheckpointManager
from ostraka.compat.orbax.checkpoint_manager import (
    CheckpointManagerOptions as CheckpointManagerOptions,
)
from ostraka.compat.orbax.checkpointers import AbstractCheckpointer as AbstractCheckpointer
from ostraka.compat.orbax.checkpointers import AsyncCheckpointer as AsyncCheckpointer
from ostraka.compat.orbax.checkpointers import Checkpointer as Checkpointer
from ostraka.compat.orbax.checkpointers import PyTreeCheckpointer as PyTreeCheckpointer
from ostraka.compat.orbax.checkpointers import StandardCheckpointer as StandardCheckpointer
from ostraka.compat.orbax.future import Future as Future
from ostraka.compat.orbax.handlers import ArrayCheckpointHandler as ArrayCheckpointHandler
from ostraka.compat.orbax.handlers import AsyncCheckpointHandler as AsyncCheckpointHandler
from ostraka.compat.orbax.handlers import (
    BasePyTreeCheckpointHandler as BasePyTreeCheckpointHandler,
)
from ostraka.compat.orbax.handlers import CheckpointHandler as CheckpointHandler
from ostraka.compat.orbax.handlers import CheckpointHandlerRegistry as CheckpointHandlerRegistry
from ostraka.compat.orbax.handlers import CompositeCheckpointHandler as CompositeCheckpointHandler
from ostraka.compat.orbax.handlers import CompositeOptions as CompositeOptions
from ostraka.compat.orbax.handlers import (
    DefaultCheckpointHandlerRegistry as DefaultCheckpointHandlerRegistry,
)
from ostraka.compat.orbax.handlers import (
    JaxRandomKeyCheckpointHandler as JaxRandomKeyCheckpointHandler,
)
from ostraka.compat.orbax.handlers import JsonCheckpointHandler as JsonCheckpointHandler
from ostraka.compat.orbax.handlers import (
    NumpyRandomKeyCheckpointHandler as NumpyRandomKeyCheckpointHandler,
)
from ostraka.compat.orbax.handlers import ProtoCheckpointHandler as ProtoCheckpointHandler
from ostraka.compat.orbax.handlers import PyTreeCheckpointHandler as PyTreeCheckpointHandler
from ostraka.compat.orbax.handlers import StandardCheckpointHandler as StandardCheckpointHandler
from ostraka.compat.orbax.options import AsyncOptions as AsyncOptions
from ostraka.compat.orbax.transform_utils import RestoreTransform as RestoreTransform
from ostraka.compat.orbax.transform_utils import Transform as Transform
from ostraka.compat.orbax.transform_utils import apply_transformations as apply_transformations
from ostraka.compat.orbax.transform_utils import merge_trees as merge_trees
from ostraka.compat.orbax.type_handlers import ArrayRestoreArgs as ArrayRestoreArgs
from ostraka.compat.orbax.type_handlers import RestoreArgs as RestoreArgs
from ostraka.compat.orbax.type_handlers import SaveArgs as SaveArgs

__version__ = "0.12.8"
"""The version of Orbax whose names and behaviour these are."""

__getattr__ = _refuse(__name__)
_install()
