"""Arrays that pass between scheduler, executor and bench; their uses give shapes and dtypes."""

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
