"""Arrays and their shapes."""

from ostraka.compat.orbax._refuse import refuse
from ostraka.compat.orbax.utils import to_shape_dtype_struct as to_shape_dtype_struct

__getattr__ = refuse(__name__)
