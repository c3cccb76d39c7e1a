"""Orbax's names over Ostraka: `import ostraka.compat.orbax as ocp`.

Programs for `orbax.checkpoint` run with that line changed, and save Ostraka checkpoints. Steps
that Orbax wrote are listed, restored and retained too. Unsupported names and options raise an error
that names them. docs/from/orbax.md lists them.
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
from ostraka.compat.orbax import tree as tree
from ostraka.compat.orbax import type_handlers as type_handlers
from ostraka.compat.orbax import utils as utils
from ostraka.compat.orbax import v1 as v1
from ostraka.compat.orbax._names import install as _install
from ostraka.compat.orbax._names import refuse as _refuse

AbstractCheckpointManager = checkpoint_manager.AbstractCheckpointManager
CheckpointManager = checkpoint_manager.CheckpointManager
CheckpointManagerOptions = checkpoint_manager.CheckpointManagerOptions
PLACEHOLDER = checkpoint_utils.PLACEHOLDER
AbstractCheckpointer = checkpointers.AbstractCheckpointer
AsyncCheckpointer = checkpointers.AsyncCheckpointer
Checkpointer = checkpointers.Checkpointer
PyTreeCheckpointer = checkpointers.PyTreeCheckpointer
StandardCheckpointer = checkpointers.StandardCheckpointer
Future = future.Future
ArrayCheckpointHandler = handlers.ArrayCheckpointHandler
AsyncCheckpointHandler = handlers.AsyncCheckpointHandler
BasePyTreeCheckpointHandler = handlers.BasePyTreeCheckpointHandler
CheckpointHandler = handlers.CheckpointHandler
CheckpointHandlerRegistry = handlers.CheckpointHandlerRegistry
CompositeCheckpointHandler = handlers.CompositeCheckpointHandler
CompositeOptions = handlers.CompositeOptions
DefaultCheckpointHandlerRegistry = handlers.DefaultCheckpointHandlerRegistry
JaxRandomKeyCheckpointHandler = handlers.JaxRandomKeyCheckpointHandler
JsonCheckpointHandler = handlers.JsonCheckpointHandler
NumpyRandomKeyCheckpointHandler = handlers.NumpyRandomKeyCheckpointHandler
ProtoCheckpointHandler = handlers.ProtoCheckpointHandler
PyTreeCheckpointHandler = handlers.PyTreeCheckpointHandler
StandardCheckpointHandler = handlers.StandardCheckpointHandler
AsyncOptions = options.AsyncOptions
RestoreTransform = tree.RestoreTransform
Transform = tree.Transform
apply_transformations = tree.apply_transformations
merge_trees = tree.merge_trees
ArrayRestoreArgs = type_handlers.ArrayRestoreArgs
RestoreArgs = type_handlers.RestoreArgs
SaveArgs = type_handlers.SaveArgs

__version__ = "0.12.8"
"""The version of Orbax whose names and behaviour these are."""

__getattr__ = _refuse(__name__)
_install()
