"""Which process an object belongs to: a forked child has a copy of it, but none of the threads that serve it."""

import os

from dflash_trt.core.errors import ForkError


class OwnProcess:
    """The process in which this was made. Locks of its owner are not to be taken in another one: they may be held."""

    def __init__(self) -> None:
        self.process_id = os.getpid()

    @property
    def is_this(self) -> bool:
        return os.getpid() == self.process_id

    def check(self) -> None:
        """Raises ForkError in a forked child."""
        if not self.is_this:
            found = f"its forked child {os.getpid()}"
            hint = 'Open the engine in the child, or start it with multiprocessing\'s "spawn".'
            raise ForkError.about("engine", expected=f"process {self.process_id}", found=found, hint=hint)
