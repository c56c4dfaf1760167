"""The arrays that pass between scheduler, executor and bench; shapes and dtypes stand where they are used."""

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
