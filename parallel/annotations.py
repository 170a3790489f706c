"""Types for annotations, of what comes in more than one kind."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

# An array on the host or on devices; models and what checks their input take both.
AnyArray = jax.Array | np.ndarray

# A number of Python or NumPy.
Integer = int | np.integer

# Place of a shard in an array, a tuple of slices. The stubs of JAX allow for `None`, which no
# sharding on a mesh has.
Index = Any

# Where a program is exported for any number of points, sizes are symbolic, and their type is no
# integer and not public in JAX. A position may be traced as well.
if TYPE_CHECKING:
    Size = int
    Position = int | jax.Array
else:
    Size = Position = Any
