"""One visit to a GPU machine, in six parts of under 10 minutes each; a case that fails costs itself alone.

1 native kernels and steps against their references (tests/gpu, tests/kernels), 2 kernel times against floors and
PyTorch, 3 times of decode steps, 4 a profile and the waits of a step, 5 A/B of open choices, 6 engines of the demo
pair against the CPU. Every case is written to results.jsonl when it ends, and results.md holds the tables. Needs torch
with CUDA, triton and numpy; --wheels names a directory with the rest, which --fetch-wheels fills where there is a
package index.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from gpu_visit_parts import supervisor, wheels  # noqa: E402
from gpu_visit_parts.results import Results  # noqa: E402

PARTS = {1: "native kernels", 2: "kernel times", 3: "steps", 4: "profile", 5: "choices", 6: "engines"}


def main() -> int:
    options = _parse()
    if options.fetch_wheels:
        directory = options.wheels or ROOT / "build/gpu_wheels"
        num_bytes = wheels.fetch(directory, python_version=options.python_version)
        print(f"{num_bytes / 2**20:.1f} MiB in {directory}: pass it along, with --wheels, to the machine")
        return 0
    if options.child:
        return _run_child(options.child, options)
    return _supervise(options)


def _supervise(options: argparse.Namespace) -> int:
    results = Results(options.out)
    if options.resume is not None and options.resume.resolve() != options.out.resolve():
        shutil.copy(options.resume / "results.jsonl", options.out)
    for part in options.part:
        if options.resume is None:
            results.forget(part)
        elif options.retry_failed:
            results.forget(part, ("failed",))
    installed = wheels.install(options.wheels, options.site) if options.wheels else []
    print(f"wheels unpacked: {len(installed)}", flush=True)
    missing = wheels.missing_packages(options.part, [str(options.site), *sys.path])
    if missing:
        hint = "Install them with scripts/install --dev, or carry them: --fetch-wheels, then --wheels DIR."
        print(f"error: Python: expected {', '.join(missing)}, found none. {hint}", file=sys.stderr)
        return 1
    os.environ["PYTHONPATH"] = os.pathsep.join([str(options.site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ["PYTHONUNBUFFERED"] = "1"
    for part in options.part:
        print(f"== part {part}: {PARTS[part]}", flush=True)
        command = [sys.executable, __file__, "--child", str(part), "--case", options.case]
        command += ["--dry-run"] if options.dry_run else []
        num_jobs = options.jobs if part == 1 else 1  # tests alone may share the GPU
        supervisor.run_part(
            part, command, results, num_jobs=num_jobs, deadline_s=time.monotonic() + options.max_seconds
        )
    results.write_tables()
    print((options.out / "results.md").read_text().split("\n## ")[0])
    return 1 if any(row["status"] != "ok" for row in results.cases().values() if row["status"] != "left out") else 0


def _run_child(part: int, options: argparse.Namespace) -> int:
    """The cases of a part that have no result yet; `supervisor.run_part` reads the exit code."""
    import torch

    if options.dry_run and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    results = Results(options.out)
    from gpu_visit_parts.setting import SETTING

    if options.dry_run:
        SETTING.shrink()
    if part == 1:
        from gpu_visit_parts import native_tests

        return native_tests.run(part, results, options.case, share=options.share)
    return _run_cases(part, results, options)


def _run_cases(part: int, results: Results, options: argparse.Namespace) -> int:
    import torch
    from gpu_visit_parts.setting import LeftOutError, context_is_broken

    cases = [case for case in _cases(part, options.out) if re.search(options.case, case.name)]
    supervisor.has_started(part, results)
    done = results.done(part)
    for case in cases:
        if case.name in done:
            continue
        results.start(part, case.name)
        try:
            with torch.inference_mode():
                tables = case.run()
        except LeftOutError as error:
            results.end(part, case.name, "left out", why=str(error))
        except Exception:  # noqa: BLE001 - whatever it is belongs into the results
            results.end(part, case.name, "failed", why=traceback.format_exc())
        else:
            results.end(part, case.name, "ok", tables=tables)
        torch.cuda.empty_cache()
        if context_is_broken():
            return supervisor.CONTEXT_IS_BROKEN
    return 0


def _cases(part, directory):
    """Imports only what the part needs."""
    if part == 2:
        from gpu_visit_parts import kernels, machine

        return [*machine.cases(), *kernels.cases()]
    if part == 3:
        from gpu_visit_parts import steps

        return steps.cases()
    if part == 4:
        from gpu_visit_parts import profile

        return profile.cases(directory)
    if part == 6:
        from gpu_visit_parts import engines

        return engines.cases()
    from gpu_visit_parts import choices

    return choices.cases()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_visit", description=__doc__)
    parser.add_argument("--part", type=int, nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    out = Path(os.environ.get("OUT") or ROOT / "build/gpu_visit")
    parser.add_argument(
        "--out", type=Path, default=out, help="directory of the results (default: $OUT, else %(default)s)"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        nargs="?",
        const=None,
        default=False,
        metavar="DIR",
        help="skip what has a result in DIR (default: the directory of --out), whose results are taken over",
    )
    parser.add_argument("--retry-failed", action="store_true", help="with --resume: run what failed again")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that share the tests of part 1")
    parser.add_argument("--max-seconds", type=float, default=540.0, help="of each part")
    parser.add_argument("--case", default="", metavar="REGEX", help="only cases whose name has a match")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes under Triton's interpreter, on the CPU")
    parser.add_argument("--wheels", type=Path, help="directory of wheels to unpack, or to fill (build/gpu_wheels)")
    site = Path(tempfile.gettempdir()) / "gpu_visit_site"
    parser.add_argument("--site", type=Path, default=site, help="where the wheels are unpacked")
    parser.add_argument("--fetch-wheels", action="store_true", help="fill --wheels by pip, and end")
    parser.add_argument("--python-version", default="3.12", help="of the machine that the wheels are for")
    parser.add_argument("--child", type=int, choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out, options.wheels = options.out.resolve(), options.wheels and options.wheels.resolve()
    if options.resume is None:
        options.resume = options.out
    elif options.resume is False:
        options.resume = None
    return options


if __name__ == "__main__":
    sys.exit(main())
