"""The console script. Commands are imported where Ctrl-C is handled: a run begins with its imports."""

import sys
from typing import NoReturn

from dflash_trt.core.exit_codes import ExitCode


def main() -> NoReturn:
    try:
        from dflash_trt.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(ExitCode.INTERRUPTED)
    run()
