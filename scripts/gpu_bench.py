"""Measure kernels, steps and a profile on this machine's GPU. See scripts/gpu_bench."""

import argparse
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

PARTS = ("kernels", "steps", "profile")


def main() -> int:
    options = parse()
    try:
        import torch
        import triton
    except ImportError as error:
        print(
            f"error: gpu_bench needs PyTorch with CUDA and Triton, and {error.name} is not installed", file=sys.stderr
        )
        return 2
    if not torch.cuda.is_available():
        print(
            "error: gpu_bench: expected a CUDA GPU that PyTorch can use, found none. Run it on a machine with one.",
            file=sys.stderr,
        )
        return 2
    from gpu_bench_parts.report import Report
    from gpu_bench_parts.timing import machine_roofs

    deadline_s = time.monotonic() + options.max_seconds
    report = Report(directory=options.out, command=sys.argv)
    with torch.inference_mode():
        roofs = machine_roofs()
        report.add_machine(roofs, torch_version=torch.__version__, triton_version=triton.__version__)
        for part in PARTS if options.part == "all" else (options.part,):
            try:
                run_part(part, report, roofs, options, deadline_s)
            except ModuleNotFoundError as error:
                print(f"error: gpu_bench --part {part} needs {error.name}, which is not installed", file=sys.stderr)
                return 2
    report.write()
    print(f"wrote {report.directory / 'results.json'} and {report.directory / 'results.md'}")
    return 1 if report.failures else 0


def run_part(part, report, roofs, options, deadline_s):
    """Imports only what the part needs: the kernels run without safetensors and pydantic."""
    if part == "kernels":
        from gpu_bench_parts.kernels import measure_kernels

        measure_kernels(report, roofs, deadline_s=deadline_s, is_quick=options.quick)
    elif part == "steps":
        from gpu_bench_parts.steps import measure_steps

        measure_steps(
            report,
            roofs,
            deadline_s=deadline_s,
            models=options.models,
            formats=options.formats,
            contexts=options.contexts,
            batch_sizes=options.batch_sizes,
            draft_lens=options.draft_lens,
        )
    else:
        from gpu_bench_parts.profile import profile_step

        profile_step(report, model=options.models[0], weight_format=options.formats[0])
    report.write()  # what is measured stays, whatever comes next


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_bench", description=__doc__)
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_bench"), help="folder of the results")
    parser.add_argument("--max-seconds", type=float, default=540.0, help="start no new measurement after this")
    parser.add_argument("--quick", action="store_true", help="one shape per kernel")
    parser.add_argument("--models", nargs="+", choices=("qwen3-8b", "llama-3.1-8b", "tiny"), default=None)
    parser.add_argument("--formats", nargs="+", choices=("bf16", "fp8"), default=["bf16", "fp8"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--draft-lens", nargs="+", type=int, default=[0, 3, 7, 15])
    options = parser.parse_args()
    options.models = options.models or ["qwen3-8b", "llama-3.1-8b"]
    return options


if __name__ == "__main__":
    sys.exit(main())
