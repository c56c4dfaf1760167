"""Exit codes: one table for the commands, the errors, the Triton model and the documentation."""

from enum import IntEnum


class ExitCode(IntEnum):
    """A process's exit code; `meaning` is the text of docs/exit_codes.md."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> "ExitCode":
        code = int.__new__(cls, value)
        code._value_ = value
        code.meaning = meaning
        return code

    @property
    def words(self) -> str:
        """The name, for people."""
        return self.name.lower().replace("_", " ")

    DONE = 0, "Everything that was asked for is done."
    FAILED = (
        1,
        "Something is missing, broken or too big: a checkpoint, an engine, memory, the disk, a rank, the reader of "
        "the output. Also a bug of ours, with a traceback.",
    )
    USAGE = 2, "An option, a setting, a configuration file or an input file is wrong; nothing was loaded or written."
    REQUEST_FAILED = (
        3,
        "`run`: at least one prompt was refused or failed; the results of the others are written. `eval` and `bench "
        "speedup`: a gate was missed.",
    )
    ENGINE_LOST = (
        70,
        "The process of a Triton model, deployed with `--keep-server`: its engine failed and cannot be opened again.",
    )
    INTERRUPTED = 130, "Ctrl-C (SIGINT). `run --output-file` keeps finished rows for `--resume`."
    TERMINATED = 143, "SIGTERM, with the same effect."
