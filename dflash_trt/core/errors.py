"""The exception tree. A message says what was expected, what was found and, if not obvious, the fix.

DFlashError
|-- ConfigError       a file or flag is wrong                  exit 2
|-- CheckpointError   tensors missing, unexpected, mis-shaped  exit 1, as for all others
|-- BuildError        the engine cannot be built
|-- EngineDirError    wrong version, GPU, hash
|-- CapacityError     does not fit: memory, pages, max_seq_len
|-- RankError         one of several ranks ended, or left the others' step
|-- ForkError         an engine is used in a child that was forked from its process
`-- RequestError      this request only; the others go on      exit 3
    `-- QueueFullError    too many requests wait already; try again later
"""

from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from dflash_trt.core.exit_codes import ExitCode

_MAX_LISTED_PROBLEMS = 100

_T = TypeVar("_T")


class DFlashError(Exception):
    """A user's mistake or a lack of resources. Bugs of ours are `assert`s."""

    exit_code = ExitCode.FAILED

    @classmethod
    def about(cls, subject: str, *, expected: str, found: str, hint: str = "") -> Self:
        """An error with one `problem`."""
        return cls(problem(subject, expected=expected, found=found, hint=hint))


class ConfigError(DFlashError):
    exit_code = ExitCode.USAGE


class CheckpointError(DFlashError):
    pass


class BuildError(DFlashError):
    pass


class EngineDirError(DFlashError):
    pass


class CapacityError(DFlashError):
    pass


class RankError(DFlashError):
    pass


class ForkError(DFlashError, RuntimeError):
    pass


class RequestError(DFlashError):
    exit_code = ExitCode.REQUEST_FAILED


class QueueFullError(RequestError):
    pass


class ErrorCollector:
    """Runs independent checks and raises all of their errors as one."""

    def __init__(self) -> None:
        self._errors: list[DFlashError] = []

    def run(self, check: Callable[[], _T]) -> _T | None:
        """Return the check's result, or keep its error and return None."""
        try:
            return check()
        except DFlashError as error:
            self._errors.append(error)
            return None

    def raise_all(self, heading: str) -> None:
        """Raise the only error, or one that lists them all: a ConfigError if any is, else of the first's type."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            kinds = [type(error) for error in self._errors]
            listed = "\n".join(f"- {error}" for error in self._errors).replace("\n", "\n  ")
            kind = ConfigError if ConfigError in kinds else kinds[0]
            raise kind(f"{heading}: {len(kinds)} checks failed\n  {listed}")


def problem(subject: str, *, expected: str, found: str, hint: str = "") -> str:
    """Format one problem: `subject: expected ..., found .... Hint.` No hint where `expected` is enough."""
    return f"{subject}: expected {expected}, found {found}. {hint}".rstrip()


def raise_all(error: type[DFlashError], heading: str, problems: Sequence[str], *, hint: str = "") -> None:
    """Raise one error that lists every problem; do nothing when there is none.

    A `hint` that several problems share is given once, at the end.
    """
    if not problems:
        return
    if len(problems) == 1:
        raise error(f"{heading}: {problems[0]}")
    without_hint = [line.removesuffix(f" {hint}") for line in problems]
    is_shared = bool(hint) and sum(map(str.__ne__, problems, without_hint)) > 1
    listed = "\n".join(f"  - {line}" for line in (without_hint if is_shared else problems)[:_MAX_LISTED_PROBLEMS])
    if len(problems) > _MAX_LISTED_PROBLEMS:
        listed += f"\n  - and {len(problems) - _MAX_LISTED_PROBLEMS} more"
    ending = f"\n{hint}" if is_shared else ""
    raise error(f"{heading}: {len(problems)} problems\n{listed}{ending}")
