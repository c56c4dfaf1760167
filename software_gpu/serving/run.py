"""A serving run as a program: open an engine of a recipe or a directory, serve, close, and say what it took.

    python -m software_gpu.serving.run NAME [--set FIELD=VALUE] [--rank R] [--shapes few] [--json FILE]

The process has the software GPU (`software_gpu.runtime.library.environment`) in counting mode, and as many as the
engine has ranks. Everything is the product's, `LLM` and what it opens, but for two things: results of steps are made up
(`executor.idle.MadeUpResults`), and of several ranks only one is opened, whose exchanges nobody answers.
"""

import argparse
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest.mock import patch

import torch
import triton

from dflash_trt.backends.cuda import executor as cuda_executor
from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.padding import StepShape
from dflash_trt.backends.staging import StagedStep
from dflash_trt.core.errors import BuildError, CapacityError, ConfigError, EngineDirError
from dflash_trt.core.step_plan import StepPlan, StepResult
from dflash_trt.executor.idle import MadeUpResults
from dflash_trt.executor.ranks import executor as ranks_executor
from dflash_trt.executor.ranks.launcher import RankWorkers
from dflash_trt.recipes import recipes
from dflash_trt.serving.llm import LLM
from scripts.recipe_engine import write_engine
from software_gpu.runtime.library import SoftwareCuda, software_cuda
from software_gpu.serving.requests import CONSTRAINED, PLAIN, RULED, prompts, sampling

ROOT: Final = Path(__file__).resolve().parents[2]
GIB: Final = 2**30
ACCEPTANCE: Final = 0.7
NUM_FRAMES: Final = 4  # of the product, in a stack
NUM_KERNELS: Final = 8  # the most frequent ones
MAX_RATIO: Final = 1.1  # of the launches of a mixed step to those of a plain one


class Watch:
    """What happens while `phase` lasts: calls that make the host wait and problems, with stacks; kernels compiled."""

    def __init__(self, cuda: SoftwareCuda) -> None:
        self.phase = "opening"
        self.problems: Counter[str] = Counter()
        self.waits: dict[str, Counter[str]] = {}
        self.allocations: dict[str, Counter[str]] = {}
        self.compiled: dict[str, list[str]] = {}
        cuda.watch(self._note)
        triton.knobs.runtime.jit_post_compile_hook = self._note_compiled

    def _note(self, what: str) -> None:
        if what.startswith("problem: "):
            self.problems[f"{what.removeprefix('problem: ')} ({self.phase}): {product_stack()}"] += 1
        elif self.phase.startswith("serving"):
            told = self.allocations if what in ("cudaMalloc", "cudaHostAlloc") else self.waits
            told.setdefault(self.phase, Counter())[f"{what}: {product_stack()}"] += 1

    def _note_compiled(self, **facts: Any) -> None:
        self.compiled.setdefault(self.phase, []).append(facts["fn"].name.rpartition(".")[2])


def product_stack() -> str:
    """Where the calling thread is in the product, the innermost place first."""
    places, frame = [], sys._getframe(1)
    while frame is not None and len(places) < NUM_FRAMES:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "dflash_trt"):
            places.append(f"{path.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(places)


class Steps:
    """Every step that an executor was given while serving. Its results are made up."""

    def __init__(self, cuda: SoftwareCuda, watch: Watch, *, token_id: int) -> None:
        self.noted: list[dict[str, Any]] = []
        self._cuda, self._watch = cuda, watch
        self._token_id = token_id
        self._results: MadeUpResults | None = None
        self._submit = TorchGpuExecutor.submit
        self._last_s: float | None = None

    @staticmethod
    def submit_of(executor: TorchGpuExecutor, steps: "Steps", plan: StepPlan) -> "MadeUpStep":
        """Instead of `TorchGpuExecutor.submit`."""
        return steps.submit(executor, plan)

    def submit(self, executor: TorchGpuExecutor, plan: StepPlan) -> "MadeUpStep":
        if self._results is None:
            self._results = MadeUpResults(executor.limits, acceptance=ACCEPTANCE, token_id=self._token_id)
        launches, begun_s = self._cuda.num_launches(), time.thread_time()
        step = self._submit(executor, plan)
        submitted_s = time.thread_time() - begun_s
        from_host, on_device = (
            after - before for before, after in zip(launches, self._cuda.num_launches(), strict=True)
        )
        rows = plan.rows
        now_s = time.process_time()
        self.noted.append({
            "phase": self._watch.phase,
            "is_decode": bool((rows.num_tokens <= rows.num_draft_tokens + 1).all()),
            "num_requests": rows.num_requests,
            "num_tokens": rows.total_tokens,
            "num_from_host": from_host,
            "num_on_device": on_device,
            "submit_ms": submitted_s * 1e3,
            "host_ms": None if self._last_s is None else (now_s - self._last_s) * 1e3,
        })  # fmt: skip
        made = self._results.of(plan)
        self._last_s = time.process_time()
        return MadeUpStep(step, made)

    def rest(self) -> None:
        """The time to the next step is none of a step."""
        self._last_s = None


class MadeUpStep:
    """A step that has run, with another result; implements StepHandle."""

    def __init__(self, step: StagedStep, made: StepResult) -> None:
        self._step, self._made = step, made

    def result(self) -> StepResult:
        found = self._step.result()
        assert found.emitted_tokens.shape == self._made.emitted_tokens.shape
        return replace(self._made, top=found.top, prompt=found.prompt)

    @property
    def elapsed_s(self) -> float:
        return self._step.elapsed_s


class Memory:
    """Device memory at the end of each part of the opening, in GiB, and peaks."""

    def __init__(self, cuda: SoftwareCuda) -> None:
        self.gib: dict[str, float] = {}
        self._cuda = cuda

    def note(self, part: str) -> None:
        self.gib[part] = round(self._cuda.used_bytes() / GIB, 2)

    def after(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            found = function(*args, **options)
            self.note(part)
            return found

        return noted


@contextmanager
def alone(rank: int) -> Iterator[None]:
    """Engines of several ranks are opened as this rank's shard: no process is started for the others.

    The group counts this process as rank 0, whose exchanges need nobody to begin.
    """
    open_shard = ranks_executor.open_shard

    def open_own(engine: Any, _: int, ranks: Any, options: Any) -> Any:
        ranks.rank = rank
        return open_shard(engine, rank, ranks, options)

    with (
        patch.object(RankWorkers, "start", lambda workers, order: None),
        patch.object(ranks_executor, "open_shard", open_own),
    ):
        yield


def few(shapes: Sequence[StepShape]) -> list[StepShape]:
    """All but captured steps with a prefill chunk, of which there are the longest and the shortest of each K."""
    mixed: dict[int, list[StepShape]] = {}
    for shape in shapes:
        if shape.has_graph and not shape.is_decode:
            mixed.setdefault(shape.num_draft_tokens, []).append(shape)
    kept = {shape for group in mixed.values() for shape in (group[0], group[-1])}
    return [shape for shape in shapes if shape in kept or shape.is_decode or not shape.has_graph]


def serving_run(engine: Path, *, rank: int = 0, has_few_shapes: bool = False) -> dict[str, Any]:
    """The report of a run; see `reported`."""
    cuda = software_cuda()
    watch, memory = Watch(cuda), Memory(cuda)
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "rank": rank,
        "shapes": "few" if has_few_shapes else "all",
    }
    before_bytes = cuda.used_bytes()
    warm_shapes = cuda_executor.warm_shapes
    with ExitStack() as stack:

        def swap(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(owner, name, value))

        stack.enter_context(alone(rank))
        swap(cuda_executor, "load_network", memory.after("weights", cuda_executor.load_network))
        swap(TorchGpuExecutor, "__init__", memory.after("pages", TorchGpuExecutor.__init__))
        swap(TorchGpuExecutor, "warm_up", memory.after("graphs", TorchGpuExecutor.warm_up))
        if has_few_shapes:
            swap(cuda_executor, "warm_shapes", lambda *args, **options: few(warm_shapes(*args, **options)))
        began_s = time.monotonic()
        llm = LLM(engine, device="cuda")
        try:
            report |= _opened(llm, cuda, watch, opened_s=time.monotonic() - began_s)
            token_id = 10 if llm.codec is None else llm.codec.backend.token_to_id("a")
            steps = Steps(cuda, watch, token_id=token_id)
            swap(TorchGpuExecutor, "submit", partialmethod(Steps.submit_of, steps))
            report["serving"] = _served(llm, cuda, watch, steps)
            memory.note("serving")
        finally:
            watch.phase = "closing"
            llm.close()
    del llm
    gc.collect()
    report["memory_gib"] = memory.gib
    report["tensors_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    report["peak_gib"] = round((cuda.peak_bytes() + _context_bytes(cuda)) / GIB, 2)
    report["gpu_gib"] = round(torch.cuda.mem_get_info()[1] / GIB, 2)
    report["left_bytes"] = cuda.used_bytes() - before_bytes
    report["problems"] = [f"{what} (x{count})" if count > 1 else what for what, count in watch.problems.items()]
    return report


def _context_bytes(cuda: SoftwareCuda) -> int:
    """Of the driver: what is neither free nor used."""
    free_bytes, all_bytes = torch.cuda.mem_get_info()
    return int(all_bytes - free_bytes - cuda.used_bytes())


def _opened(llm: LLM, cuda: SoftwareCuda, watch: Watch, *, opened_s: float) -> dict[str, Any]:
    counts = cuda.counts()
    return {
        "num_ranks": llm.engine.manifest.pretrained_config.mapping.world_size,
        "page_plan": str(llm.page_plan),
        "open_s": round(opened_s, 1),
        "num_graphs": counts.get("graphs", 0),
        "num_graph_nodes": counts.get("graph nodes", 0),
        "num_kernels_compiled": len(watch.compiled.get("opening", [])),
        "num_cuda_frees": counts.get("cudaFree", 0),
    }


def _served(llm: LLM, cuda: SoftwareCuda, watch: Watch, steps: Steps) -> dict[str, Any]:
    """Plain requests, then mixed ones."""
    mixed = (*PLAIN, *RULED, *([] if llm.codec is None else [CONSTRAINED]))
    served = {}
    for seed, (name, kinds) in enumerate((("plain", PLAIN), ("mixed", mixed))):
        watch.phase = f"serving {name}"
        cuda.reset_counts()
        steps.rest()
        outputs = llm.generate(prompts(seed, max_len=llm.limits.max_seq_len - 100), sampling(kinds))
        watch.phase = "between"
        errors = Counter(output.error for output in outputs if output.error)
        served[name] = _part(cuda, watch, steps, f"serving {name}") | {
            "num_requests": len(outputs),
            "num_new_tokens": sum(len(output.token_ids) for output in outputs),
            "errors": dict(errors),
        }
    return served


def _part(cuda: SoftwareCuda, watch: Watch, steps: Steps, phase: str) -> dict[str, Any]:
    noted = [step for step in steps.noted if step["phase"] == phase]
    decode = [step for step in noted if step["is_decode"]]
    counts = cuda.counts()
    kernels = Counter[str]()
    for name, count in counts.items():
        kind, _, kernel = name.removeprefix("in graphs: ").partition(" ")
        if kind == "kernel" or kind.startswith(("cublas", "nccl")):
            kernels[_short(kernel if kind == "kernel" else kind)] += count
    waits, allocations = (told.get(phase, Counter()) for told in (watch.waits, watch.allocations))
    compiled = watch.compiled.get(phase, [])
    return {
        "num_steps": len(noted),
        "num_decode_steps": len(decode),
        "decode": {name: _middle(decode, name) for name in ("num_from_host", "num_on_device", "submit_ms", "host_ms")},
        "kernels_per_step": {
            name: round(count / max(len(noted), 1), 1) for name, count in kernels.most_common(NUM_KERNELS)
        },
        "copies_bytes": {
            name.removeprefix("bytes "): count for name, count in counts.items() if name.startswith("bytes ")
        },
        "num_compiled": len(compiled),
        "compiled": sorted(set(compiled)),
        "num_waits": sum(waits.values()),
        "waits": [f"{count}x {what}" for what, count in waits.most_common()],
        "num_allocations": sum(allocations.values()),
        "allocations": [f"{count}x {what}" for what, count in allocations.most_common()],
    }


def _middle(steps: list[dict[str, Any]], name: str) -> float:
    values = [step[name] for step in steps if step[name] is not None]
    return round(median(values), 2) if values else 0.0


def _short(kernel: str) -> str:
    """A kernel of libtorch without its templates."""
    return kernel.partition("<")[0].removeprefix("void ").partition("(")[0].rpartition("::")[2]


def report_of(name: str, changes: Mapping[str, Any], *, rank: int, has_few_shapes: bool) -> dict[str, Any]:
    """Of a recipe, with `changes` of its fields, or of an engine directory; a refusal is a report, too."""
    recipe = next((recipe for recipe in recipes() if recipe.name == name), None)
    with TemporaryDirectory(prefix="software-gpu-") as directory:
        try:
            if recipe is not None:
                write_engine(recipe, Path(directory), capability=torch.cuda.get_device_capability(), changes=changes)
            engine = Path(name) if recipe is None else Path(directory) / "engine"
            return {"name": name} | serving_run(engine, rank=rank, has_few_shapes=has_few_shapes)
        except (BuildError, CapacityError, ConfigError, EngineDirError) as error:
            return {"name": name, "gpu": torch.cuda.get_device_name(), "refused": str(error)}


def bars(report: dict[str, Any]) -> list[str]:
    """What a run is held to and does not reach."""
    plain, mixed = report["serving"]["plain"], report["serving"]["mixed"]
    missed = []
    for name, part in report["serving"].items():
        if part["num_compiled"]:
            missed.append(f"{part['num_compiled']} kernels compiled while serving {name} requests")
        if part["num_waits"]:
            missed.append(f"{part['num_waits']} calls hold the host up while serving {name} requests")
        missed += [f"{count} {name} requests failed: {error}" for error, count in part["errors"].items()]
    of_plain, of_mixed = plain["decode"]["num_on_device"], mixed["decode"]["num_on_device"]
    if of_mixed > MAX_RATIO * of_plain:
        missed.append(f"{of_mixed:g} launches on the device in a mixed batch, {of_plain:g} in a plain one")
    if report["problems"]:
        missed.append(f"{len(report['problems'])} problems")
    if report["left_bytes"]:
        missed.append(f"{report['left_bytes']} bytes left after close")
    return missed


def reported(report: dict[str, Any]) -> Iterator[str]:
    """Lines for people."""
    yield f"{report['name']} on {report['gpu']}"
    if "refused" in report:
        yield f"refused: {report['refused']}"
        return
    memory = ", ".join(f"{name} {gib:.2f}" for name, gib in report["memory_gib"].items())
    yield f"rank {report['rank']} of {report['num_ranks']}; {report['page_plan']}"
    peak = f"peak {report['peak_gib']:.2f} of {report['gpu_gib']:.2f}, {report['tensors_gib']:.2f} in tensors"
    yield f"memory in GiB after {memory}; {peak}"
    yield (
        f"opened in {report['open_s']:.0f} s: {report['num_kernels_compiled']} kernels, {report['num_graphs']} graphs "
        f"of {report['num_graph_nodes']} nodes ({report['shapes']} shapes), {report['num_cuda_frees']} cudaFree"
    )
    for name, part in report["serving"].items():
        step = part["decode"]
        yield f"{name}: {part['num_requests']} requests, {part['num_new_tokens']} tokens, {part['num_steps']} steps"
        yield (
            f"  a step of verify blocks: {step['num_on_device']:g} launches on the device, {step['num_from_host']:g} "
            f"from the host; {step['host_ms']:.1f} ms of CPU, of which {step['submit_ms']:.1f} ms to submit it"
        )
        yield "  launches per step: " + ", ".join(f"{kernel} {n:g}" for kernel, n in part["kernels_per_step"].items())
        yield "  bytes copied: " + ", ".join(f"{kind} {n}" for kind, n in part["copies_bytes"].items())
        yield f"  compiled while serving: {part['num_compiled']} {', '.join(part['compiled'])}"
        yield f"  allocations of memory: {part['num_allocations']}; calls that hold the host up: {part['num_waits']}"
        yield from (f"    {wait}" for wait in part["waits"])
    yield f"problems: {len(report['problems'])}"
    yield from (f"  {text}" for text in report["problems"])
    yield f"bytes left after close: {report['left_bytes']}"
    missed = bars(report)
    yield "bars: all reached" if not missed else "bars missed:"
    yield from (f"  {text}" for text in missed)


def changed_field(text: str) -> tuple[str, Any]:
    """`dcp_size=8`; raises ValueError for a value that is no JSON."""
    name, _, value = text.partition("=")
    return name, json.loads(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--shapes", choices=("all", "few"), default="all")
    parser.add_argument("--set", type=changed_field, action="append", default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = report_of(options.name, dict(options.set), rank=options.rank, has_few_shapes=options.shapes == "few")
    sys.stdout.writelines(f"{line}\n" for line in reported(report))
    sys.stdout.flush()
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
