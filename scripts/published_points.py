#!/usr/bin/env python3
"""Planned against published speeds of other engines: docs/published_speeds.md and two tables of docs/simulation.md.

    python -m scripts.published_points [--fit]

scripts/published_points.yaml has the points with their sources. Kernels take what NVIDIA measured (the extra
`silicon`). What other engines add between them is fitted to every second series, in the order of their names, with and
without a drafter, and tested on the others. --fit fits it anew and prints the constants of OTHERS.

A point is the steady state of its clients (`simulation.advice`). Where a source does not say how long prompts and
answers were, they are taken as 128 and 1,024 tokens.
"""

import argparse
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import yaml
from scipy.optimize import least_squares

from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.quantization import QuantizationConfig
from dflash_trt.plan.gpus import gpu_of
from dflash_trt.plan.kernel_fits import FittedKernels
from dflash_trt.plan.kernel_tables import KernelTables
from dflash_trt.plan.planning import EnginePlan, plan_engine
from dflash_trt.plan.step_costs import StepClock, assumed_costs
from dflash_trt.simulation.acceptance import AcceptanceByPosition
from dflash_trt.simulation.advice import Layout
from dflash_trt.simulation.load import Lengths
from scripts.published_shapes import write_config

_ROOT = Path(__file__).resolve().parents[1]
_POINTS = Path(__file__).with_suffix(".yaml")
_PAGE = _ROOT / "docs" / "simulation.md"
_TABLE = _ROOT / "docs" / "published_speeds.md"
_SUMMARY_MARK, _CLAIMS_MARK = "<!-- summary -->", "<!-- claims -->"
_TABLE_MARK, _FIRST_MARK = "<!-- points -->", "<!-- first tokens -->"
# Seconds a layer and a pass of the drafter.
OTHERS = {"layer_s": 33e-6, "pass_s": 2.5e-3}
_POST = (
    "https://developer.nvidia.com/blog/boost-inference-performance-up-to-15x-on-nvidia-blackwell-using-dflash-"
    "speculative-decoding/"
)
_PAPER = "https://arxiv.org/abs/2602.06036"


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points [clients, K, acceptance length, tok/s of all clients] of one engine, from one table."""

    source: str
    url: str
    where: str
    engine: str
    target: str
    drafter: str | None
    quantization: str | None
    gpu: str
    tp_size: int
    ep_size: int
    prompt_tokens: int | None
    output_tokens: int | None
    points: tuple[tuple[int, int, float, float], ...]
    left_out: str | None = None  # of the statistics: why
    first_token_ms: float | None = None  # of a single client

    @property
    def name(self) -> str:
        formats = self.quantization or "as stored"
        ranks = f"{self.tp_size} x {self.gpu}"
        return (
            f"{self.engine}, {self.target}, {formats}, {ranks}, {self.prompt_tokens}/{self.output_tokens}, {self.where}"
        )

    @property
    def lengths(self) -> Lengths:
        return Lengths(num_prompt_tokens=self.prompt_tokens or 128, num_output_tokens=self.output_tokens or 1024)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published speed-up over autoregressive decoding; a length of None is unsaid."""

    text: str
    url: str
    target: str
    drafter: str
    gpu: str
    clients: int
    drafts: int
    gain: float
    length: float | None = None
    ranks: int = 1

    def series(self, drafter: str | None) -> Series:
        ep_size = self.ranks if "gpt-oss" in self.target else 1
        return Series(
            source=self.text,
            url=self.url,
            where="",
            engine="",
            target=self.target,
            drafter=drafter,
            quantization=None,
            gpu=self.gpu,
            tp_size=self.ranks,
            ep_size=ep_size,
            prompt_tokens=128,
            output_tokens=1024,
            points=(),
        )

    def gain_at(self, length: float, others: dict[str, float]) -> float:
        """By plan."""
        plain = seconds(self.series(None), (self.clients, 0, 1.0, 0.0), others)
        return plain / seconds(self.series(self.drafter), (self.clients, self.drafts, length, 0.0), others)

    def needed_length(self, others: dict[str, float]) -> float:
        """Tokens per verify step with which the plan has the claimed gain."""
        lengths = np.linspace(1.0, self.drafts + 1.0, 10 * self.drafts + 1)
        gains = [self.gain_at(float(length), others) for length in lengths]
        return float(np.interp(self.gain, gains, lengths))


_QWEN = {"target": "Qwen/Qwen3-8B", "drafter": "z-lab/Qwen3-8B-DFlash-b16", "gpu": "b200", "drafts": 15}
_GEMMA = {"target": "google/gemma-4-31B-it", "drafter": "z-lab/gemma-4-31B-it-DFlash", "gpu": "b300", "drafts": 15}
_OSS = {"target": "openai/gpt-oss-120b", "drafter": "z-lab/gpt-oss-120b-DFlash", "gpu": "b300", "drafts": 9}
CLAIMS = (
    *(
        Claim(text=f"SGLang, Math500, {clients} at once", url=_PAPER, clients=clients, gain=gain, length=8.01, **_QWEN)
        for clients, gain in ((1, 5.1), (4, 4.5), (8, 4.5), (16, 3.9), (32, 2.8))
    ),
    Claim(text="SGLang, HumanEval, 1 at once", url=_POST, clients=1, gain=4.2, length=6.5, **_QWEN),
    *(
        Claim(text=f"vLLM, {name}, 1 at once", url=_POST, clients=1, gain=gain, **_GEMMA)
        for name, gain in (("Math500", 5.8), ("HumanEval", 5.6), ("GSM8K", 5.3))
    ),
    Claim(text="TensorRT-LLM, coding, 1 at once", url=_POST, clients=1, gain=2.0, ranks=8, **_OSS),
)


def read() -> list[Series]:
    """By name."""
    stored = yaml.safe_load(_POINTS.read_text())
    series = [Series(**fields | {"points": tuple(map(tuple, fields["points"]))}) for fields in stored]
    return sorted(series, key=lambda item: item.name)


@cache
def planned(
    target: str, drafter: str | None, quantization: str | None, gpu: str, tp_size: int, ep_size: int
) -> EnginePlan:
    with tempfile.TemporaryDirectory() as root:
        paths = [write_config(Path(root), name) for name in (target, drafter) if name is not None]
        pair = read_pair(paths[0], paths[1] if drafter else None)
        config = BuildConfig(
            target=str(paths[0]),
            drafter=str(paths[1]) if drafter else None,
            quantization=QuantizationConfig(target=quantization) if quantization else None,
            tp_size=tp_size,
            ep_size=ep_size,
            max_batch_size=512,
            max_seq_len=16384,
            max_num_tokens=16384,
        )
        return plan_engine(config, pair, gpu_of(gpu))


@cache
def _tables(gpu: str) -> KernelTables:
    return KernelTables(gpu)


def _layout(series: Series, drafts: int, length: float, others: dict[str, float]) -> Layout:
    gpu = gpu_of(series.gpu)
    costs = assumed_costs(gpu).model_copy(update=others)
    plan = planned(series.target, series.drafter, series.quantization, series.gpu, series.tp_size, series.ep_size)
    rate = (length - 1) / drafts if drafts else 0.0
    return Layout(
        made=plan,
        clock=StepClock(gpu, costs, [_tables(series.gpu), FittedKernels(gpu)]),
        acceptance=AcceptanceByPosition((rate,) * drafts) if drafts else None,
        lengths=series.lengths,
        num_replicas=1,
        format=series.quantization,
    )


def seconds(series: Series, point: Sequence[float], others: dict[str, float]) -> float:
    """Of a round: every client's prompt and answer, with what other engines add."""
    clients, drafts, length = int(point[0]), int(point[1]), point[2]
    tok_per_s = _layout(series, drafts, length, others).speed(clients, drafts).output_tok_per_s
    return clients * series.lengths.num_output_tokens / tok_per_s


def published_seconds(series: Series, point: Sequence[float]) -> float:
    return point[0] * series.lengths.num_output_tokens / point[3]


def fitted(series: Sequence[Series]) -> dict[str, float]:
    """Least squares of the logarithms; a round's time is linear in the constants."""
    none = dict.fromkeys(OTHERS, 0.0)
    units = dict.fromkeys(OTHERS, 1e-6)
    base, slopes, known, weights = [], [], [], []
    for item in series:
        for point in item.points:
            without = seconds(item, point, none)
            base.append(without)
            slopes.append([seconds(item, point, none | {name: unit}) - without for name, unit in units.items()])
            known.append(published_seconds(item, point))
            weights.append(len(item.points) ** -0.5)
    columns, targets, scale = np.array(slopes), np.array(known), np.array(weights)

    def errors(values: np.ndarray) -> np.ndarray:
        return scale * np.log((np.array(base) + columns @ np.abs(values)) / targets)

    found = np.abs(least_squares(errors, [30.0, 1000.0], loss="soft_l1", f_scale=0.1).x)
    return {name: float(f"{value * unit:.2g}") for value, (name, unit) in zip(found, units.items(), strict=True)}


def ratios(series: Series) -> list[float]:
    """Planned over published tok/s."""
    return [published_seconds(series, point) / seconds(series, point, OTHERS) for point in series.points]


def split(series: Sequence[Series]) -> tuple[list[Series], list[Series]]:
    """Fitted and held out: every second series without a drafter, and every second one with a drafter."""
    counted = [item for item in series if item.left_out is None]
    plain, drafted = ([item for item in counted if (item.drafter is not None) == has] for has in (False, True))
    return plain[::2] + drafted[::2], plain[1::2] + drafted[1::2]


def summary(name: str, found: Sequence[float]) -> str:
    off = sorted(abs(math.log(ratio)) for ratio in found)
    within = statistics.mean(value <= math.log(1.2) for value in off)
    middle = math.exp(statistics.median(math.log(ratio) for ratio in found))
    return (
        f"| {name} | {len(found)} | {math.exp(statistics.median(off)) - 1:.1%} | {within:.0%} | {middle:.2f} | "
        f"{min(found):.2f} to {max(found):.2f} |"
    )


def summaries(series: Sequence[Series]) -> Iterator[str]:
    found = {id(item): ratios(item) for item in series}
    fit, held_out = split(series)
    left = [item for item in series if item.left_out is not None]
    yield "| | points | median off by | within 20% | median ratio | all ratios |"
    yield "|---|---:|---:|---:|---:|---|"
    for name, part in (("fitted", fit), ("**held out**", held_out), ("left out of both", left)):
        yield summary(name, [ratio for item in part for ratio in found[id(item)]])
    parts: dict[str, list[float]] = defaultdict(list)
    for item in held_out:
        for name in ("with DFlash" if item.drafter else "autoregressive", item.engine.split()[0].strip(",")):
            parts[f"held out, {name}"] += found[id(item)]
    for name, values in sorted(parts.items()):
        yield summary(name, values)


def table(series: Sequence[Series]) -> Iterator[str]:
    """A row for what an engine of a source served, with a part for each series; the engine links to the source."""
    held = {id(item) for item in split(series)[1]}
    yield "| engine | target | GPUs | **held out**, fitted, *left out*: prompt/answer, clients (K): ratio |"
    yield "|---|---|---|---|"
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for item in series:
        style = "**" if id(item) in held else "*" if item.left_out else ""
        rows[_cells(item)].append(f"{style}{_lengths(item)}{style} {_by_clients(item)}")
    for cells, parts in rows.items():
        yield f"| {' | '.join((*cells, '; '.join(parts)))} |"


def _cells(item: Series) -> tuple[str, ...]:
    target = ", ".join(filter(None, (item.target, item.quantization)))
    gpus = f"{item.tp_size} x {item.gpu}" + (f" EP {item.ep_size}" if item.ep_size > 1 else "")
    return (f"[{item.engine}]({item.url})", target, gpus)


def _lengths(item: Series) -> str:
    return "unsaid" if item.prompt_tokens is None else f"{item.prompt_tokens}/{item.output_tokens}"


def _by_clients(item: Series) -> str:
    """Ratios by clients and K: a range where a series has several data sets."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for point, ratio in zip(item.points, ratios(item), strict=True):
        found[point[:2]].append(ratio)
    texts = []
    for (clients, drafts), values in found.items():
        least, most = (f"{value:.2f}" for value in (min(values), max(values)))
        texts.append(f"{clients}{f' ({drafts})' if drafts else ''}: {least}{f' to {most}' if most != least else ''}")
    return ", ".join(texts)


def first_tokens(series: Sequence[Series]) -> Iterator[str]:
    """Times to a single client's first token, shortest prompts first."""
    yield "| engine | target, GPUs | prompt | first token, ms | planned | ratio |"
    yield "|---|---|---:|---:|---:|---:|"
    known = [(item.prompt_tokens or 0, item.first_token_ms, item) for item in series if item.first_token_ms is not None]
    for prompt, published_ms, item in sorted(known, key=lambda row: (row[2].engine, row[0], row[1])):
        planned_ms = 1e3 * _layout(item, 0, 1.0, OTHERS).speed(1, 0).time_to_first_token_s
        where = ", ".join(filter(None, (item.target, item.quantization, f"{item.tp_size} x {item.gpu}")))
        ratio = f"{planned_ms / published_ms:.2f}"
        yield f"| {item.engine} | {where} | {prompt:,} | {published_ms:.0f} | {planned_ms:.0f} | {ratio} |"


def claims() -> Iterator[str]:
    yield "| claim | target, GPUs, K | tokens per step | claimed | planned, this engine | planned, as other engines |"
    yield "|---|---|---:|---:|---:|---:|"
    for claim in CLAIMS:
        where = f"{claim.target}, {claim.ranks} x {claim.gpu}, {claim.drafts}"
        if claim.length is None:
            needed = [claim.needed_length(costs) for costs in ({}, OTHERS)]
            planned = [f"with {length:.1f} tokens per step" for length in needed]
        else:
            planned = [f"{claim.gain_at(claim.length, costs):.1f}" for costs in ({}, OTHERS)]
        cells = (f"[{claim.text}]({claim.url})", where, str(claim.length or "unsaid"), str(claim.gain), *planned)
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants anew and print them")
    words = parser.parse_args()
    series = read()
    if words.fit:
        print(fitted(split(series)[0]))
        return 0
    for path, mark, lines in (
        (_PAGE, _SUMMARY_MARK, summaries(series)),
        (_PAGE, _CLAIMS_MARK, claims()),
        (_TABLE, _FIRST_MARK, first_tokens(series)),
        (_TABLE, _TABLE_MARK, table(series)),
    ):
        before, _, after = path.read_text().split(mark)
        path.write_text("\n".join([f"{before}{mark}", *lines, f"{mark}{after}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
