"""The `dflash-trt` group: what every command shares, above all how it ends.

A user's mistake is one red message and an exit code of `core.exit_codes`, never a traceback.
"""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

import dflash_trt
from dflash_trt.cli.bench import bench
from dflash_trt.cli.build import build
from dflash_trt.cli.build_plugin import build_plugin
from dflash_trt.cli.deploy import deploy
from dflash_trt.cli.doctor import doctor
from dflash_trt.cli.eval import evaluate
from dflash_trt.cli.help_text import examples
from dflash_trt.cli.inspect import inspect
from dflash_trt.cli.other_engines import Group, answered
from dflash_trt.cli.plan import plan
from dflash_trt.cli.ranks import ranks
from dflash_trt.cli.recipes import recipes
from dflash_trt.cli.run import run
from dflash_trt.cli.runtime_options import flag_of
from dflash_trt.cli.serve import serve, worker
from dflash_trt.cli.show_drafts import show_drafts
from dflash_trt.cli.status_line import notices_shown
from dflash_trt.core.errors import DFlashError
from dflash_trt.core.exit_codes import ExitCode
from dflash_trt.core.process import let_threads_sleep
from dflash_trt.core.runtime_config import SettingError


class _Group(Group):
    """Ends the process the house way; `obj` is the command line, which provenance.json records."""

    def main(self, args: Sequence[str] | None = None, *other: Any, **options: Any) -> NoReturn:
        words = list(sys.argv[1:] if args is None else args)
        options |= {"standalone_mode": False, "obj": ["dflash-trt", *words]}
        try:
            with notices_shown():
                code = super().main(words, *other, **options)
        except SettingError as error:
            code = _fail(error.message(flag_of(error.name)), error.exit_code)
        except DFlashError as error:
            code = _fail(str(error), error.exit_code)
        except click.ClickException as error:
            shown = answered(error, words) if isinstance(error, click.NoSuchOption) else error
            shown.show()
            code = shown.exit_code
        except (click.Abort, KeyboardInterrupt):
            code = _fail("interrupted", ExitCode.INTERRUPTED)
        except BrokenPipeError:  # the reader of our output has gone, and the interpreter cannot flush it at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = ExitCode.FAILED
        except OSError as error:
            code = _fail(f"{error.filename or 'file system'}: {error.strerror or error}", ExitCode.FAILED)
        sys.exit(code if isinstance(code, int) else 0)


def _epilog() -> str:
    shown = (ExitCode.DONE, ExitCode.FAILED, ExitCode.USAGE, ExitCode.REQUEST_FAILED, ExitCode.INTERRUPTED)
    codes = ", ".join(f"{code} {code.words}" for code in shown)
    return f"Exit codes: {codes}.\n\n" + examples("dflash-trt run engine --prompt 'def fibonacci(n):'")


@click.group(
    cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}, epilog=_epilog()
)
@click.version_option(dflash_trt.__version__, prog_name="dflash-trt")
def cli() -> None:
    """A target LLM and its DFlash drafter as one engine."""


_COMMANDS = (build, build_plugin, bench, deploy, doctor, evaluate, inspect, plan, ranks, recipes, run, serve)
for command in (*_COMMANDS, show_drafts, worker):
    cli.add_command(command)


def main() -> NoReturn:
    """The console script."""
    let_threads_sleep()
    atexit.register(_skip_last_collection)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.TERMINATED))  # so that temporary files are removed
    cli.main()


def _skip_last_collection() -> None:
    """Skip the collection at exit, which walks all of PyTorch. Triton's bindings complain without it."""
    if "triton" not in sys.modules:
        gc.freeze()


def _fail(message: str, code: int) -> int:
    click.secho(f"error: {message}", fg="red", err=True)
    return code


if __name__ == "__main__":
    main()
