"""Detection of use in a forked child, which has a copy of an object but none of its threads."""

import os

from dflash_trt.core.errors import ForkError


class OwnProcess:
    """The process that created an object. No other process may take its locks: they may be held forever."""

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
