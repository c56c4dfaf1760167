"""How a measurement tells how far it has come."""

from collections.abc import Callable

# The number of the step that has ended, from 1; the number of all steps; what the step gave.
Progress = Callable[[int, int, str], None]
