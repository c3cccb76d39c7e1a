"""One module for packages that belong together; all cases of a module share their processes.

A folder that `WORLD_CASES` names has more of them.
"""

import os

if "WORLD_CASES" in os.environ:
    __path__.append(os.environ["WORLD_CASES"])

# Keras asks for TensorFlow unless it is told before it is imported.
os.environ["KERAS_BACKEND"] = "jax"
