"""What ranks with requests of their own may divide, and what it costs: the tables of docs/design/ranks.md.

PYTHONPATH=. python scripts/attention_dp_parts.py [GPU] [MAX_BATCH_SIZE]

Kimi-K2.6 with its drafter (window 4,096) on eight GPUs, from the plan: memory, K/V tokens as a multiple of those of
`--tp-size 8 --ep-size 8`, and the time of a rank's products and exchanges. Then the two exchanges of experts for the
targets of scripts/node_layouts.py, and steps of long requests. Nothing is measured.
"""

import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.checkpoint.specs import PairSpecs, with_draft_window
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.expert_exchange import all_rows_s, by_counts_s, exchange_costs, reached_fraction
from dflash_trt.core.model.draft import engine_weights
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.plan.computed_rows import ComputedRows
from dflash_trt.plan.exchanges import Exchange, Kind
from dflash_trt.plan.gpus import Gpu, gpu_of
from dflash_trt.plan.kernel_fits import FittedKernels
from dflash_trt.plan.planning import plan_engine
from dflash_trt.plan.step_costs import clock_of
from dflash_trt.plan.step_work import EngineWork, Product
from scripts.node_layouts import TARGETS
from scripts.published_shapes import write_config, write_shape

_RANKS: Final = 8
_K: Final = 7
_WINDOW: Final = 4096
_PROMPT_TOKENS: Final = 1024  # of each rank


@dataclass(frozen=True, kw_only=True)
class Part:
    """Matrices of bfloat16. Exchanges: rows of all ranks with `gathered` features, sums of `summed`, or own `columns`.

    `of_tokens`: over all tokens of a step, else over slots of draft blocks or rows of logits. `uses` in a step.
    """

    name: str
    ends: tuple[str, ...]  # of names of weights
    role: str = "target"
    uses: int = 1
    of_tokens: bool = False
    gathered: int = 0
    summed: int = 0
    columns: int = 0
    is_read: bool = True  # whole by each step
    is_built: bool = True


def _parts(pair: PairSpecs) -> list[Part]:
    target, draft = pair.target, pair.draft
    assert draft is not None
    hidden, vocab = target.hidden_size, target.vocab_size
    taps, heads = len(draft.target_layer_ids) * hidden, draft.attentions[0].q_size
    attended = target.latents[0].num_heads * target.latents[0].v_head_dim
    mlp = {"ends": ("layer.gate_up", "layer.down"), "gathered": hidden, "summed": hidden}
    return [
        Part(name="head", ends=("lm_head",), uses=2, gathered=hidden, columns=vocab),
        Part(name="embedding", ends=("embedding",), of_tokens=True, summed=hidden, is_read=False),
        Part(name="drafter's MLPs", role="draft", uses=draft.num_layers, **mlp),
        Part(name="MLP of the first layer", of_tokens=True, **mlp),
        Part(
            name="drafter's q and o",
            ends=("layer.q", "layer.o"),
            role="draft",
            uses=draft.num_layers,
            gathered=hidden + heads,
            columns=hidden + heads,
            is_built=False,
        ),
        Part(
            name="drafter's fc",
            ends=("draft.fc",),
            role="draft",
            of_tokens=True,
            gathered=taps,
            columns=hidden,
            is_built=False,
        ),
        Part(
            name="attention's output",
            ends=("layer.o",),
            uses=target.num_layers,
            of_tokens=True,
            gathered=attended,
            columns=hidden,
            is_built=False,
        ),
    ]


def _shapes(part: Part, pair: PairSpecs) -> list[tuple[int, ...]]:
    table = engine_weights(pair.target, pair.draft, None)
    found = {name: spec.shape for name, spec in table.items() if name.startswith(part.role)}
    layers = {name: ".".join(("layer", *name.split(".")[3:])) if ".layers." in name else name for name in found}
    return [shape for name, shape in found.items() if layers[name].endswith(part.ends) and len(shape) == 2]


def _saved_bytes(part: Part, pair: PairSpecs) -> int:
    """Of each rank."""
    return 2 * sum(map(math.prod, _shapes(part, pair))) * (_RANKS - 1) // _RANKS


def _times_us(part: Part, pair: PairSpecs, gpu: Gpu, num_rows: int) -> tuple[float, float]:
    """Of the whole part on each rank, for its rows; and of the divided one, for the rows of all, with exchanges."""
    kernels, shapes, others = FittedKernels(gpu), _shapes(part, pair), (_RANKS - 1) / _RANKS
    per_matrix = part.uses if len(shapes) == 1 else 1

    def products(rows: int, num_ranks: int) -> float:
        made = (
            Product(
                rows=rows,
                elements=math.prod(shape) / num_ranks,
                num_bytes=2 * math.prod(shape) / num_ranks,
                format=None,
                shape=(shape[0], shape[1]),
            )
            for shape in shapes
        )
        return per_matrix * sum(kernels.product(item).seconds for item in made) if part.is_read else 0.0

    def exchange(kind: Kind, rows: int, features: int) -> float:
        num_bytes = part.uses * rows * features * 2 * others
        item = Exchange(kind=kind, count=part.uses, rows=rows, features=features, num_bytes=num_bytes)
        return kernels.exchange(item, _RANKS).seconds if features else 0.0

    of_all = _RANKS * num_rows
    exchanged = exchange("all_gather", of_all, part.gathered) + exchange("reduce_scatter", of_all, part.summed)
    exchanged += exchange("all_to_all", num_rows, part.columns)
    return 1e6 * products(num_rows, 1), 1e6 * (products(of_all, _RANKS) + exchanged)


def _ratio(pair: PairSpecs, gpu: Gpu, max_batch_size: int, own_bytes: float, divided_bytes: float = 0.0) -> float:
    """K/V tokens over those of tensor parallelism, each with so much more memory."""

    def tokens(*, attention_dp: bool, more: float) -> int:
        config = BuildConfig(
            target="t",
            drafter="d",
            draft_window=_WINDOW,
            tp_size=_RANKS,
            ep_size=_RANKS,
            attention_dp=attention_dp,
            max_batch_size=max_batch_size if attention_dp else 64,
            max_num_tokens=_PROMPT_TOKENS if attention_dp else 4096,
            max_seq_len=131072,
        )
        return plan_engine(config, pair, replace(gpu, memory_bytes=gpu.memory_bytes + round(more))).num_kv_tokens

    return tokens(attention_dp=True, more=own_bytes) / tokens(attention_dp=False, more=divided_bytes)


def _rows(pair: PairSpecs, gpu: Gpu, max_batch_size: int) -> Iterator[str]:
    parts = _parts(pair)
    left = -sum(_saved_bytes(part, pair) for part in parts if part.is_built)
    yield f"| experts alone | | {_ratio(pair, gpu, max_batch_size, left):.2f} | | | |"
    for part in parts:
        saved = _saved_bytes(part, pair)
        if part.is_built:
            left += saved
        ratio = _ratio(pair, gpu, max_batch_size, left + (0 if part.is_built else saved))
        times = [
            " -> ".join(f"{time:,.0f}" for time in _times_us(part, pair, gpu, num_rows))
            for num_rows in (_K + 1, 16 * (_K + 1), _PROMPT_TOKENS)
        ]
        if not part.of_tokens:
            times[-1] = "-"
        name = part.name if part.is_built else f"not built: {part.name}"
        yield f"| {name} | {saved / 2**30:.2f} | {ratio:.2f} | {' | '.join(times)} |"
    # Half of the bytes of attention: q_a and kv_a are whole on every rank of tensor parallelism, too.
    halves = [
        Part(name="", ends=ends) for ends in (("layer.q_a", "layer.kv_a"), ("layer.q_b", "layer.kv_b", "layer.o"))
    ]
    copied, divided = (sum(map(math.prod, _shapes(part, pair))) for part in halves)
    ratio = _ratio(pair, gpu, max_batch_size, copied + divided, copied + divided / _RANKS)
    yield f"| attention in FP8, on both sides | {(copied + divided) / 2**30:.2f} | {ratio:.2f} | | | |"


def _exchange_rows(gpu: Gpu, root: Path) -> Iterator[str]:
    """Routed experts of a layer by the rule's costs, whether or not an MLP for every token needs all rows."""
    costs = exchange_costs(gpu.capability)
    for target, _ in TARGETS:
        spec = read_pair(write_config(root, target), None).target
        moe, row_bytes = max(spec.moes, key=lambda each: each.num_experts), 2 * spec.hidden_size
        fraction = reached_fraction(moe, _RANKS)

        def times(count: int, row_bytes: int = row_bytes, moe: Moe = moe, fraction: float = fraction) -> list[float]:
            rows = [count] * _RANKS
            counted = by_counts_s(costs, row_bytes, rows, fraction=fraction, logits_bytes=2 * moe.num_experts)
            return [1e6 * all_rows_s(costs, row_bytes, rows), 1e6 * counted]

        least = next(count for count in range(1, 1 << 16) if times(count)[1] < times(count)[0])
        cells = [" -> ".join(f"{each:,.0f}" for each in times(count)) for count in (_K + 1, 1024, 4096)]
        saved = sum(0 if each.shared_size is None else 6 * spec.hidden_size * each.shared_size for each in spec.moes)
        whole = saved * (_RANKS - 1) / _RANKS / 2**30
        runs = "all rows" if moe.shared is not None and not moe.has_own_norms else f"counts from {least:,} rows"
        words = (target.partition("/")[2], f"{fraction:.2f}", f"{least:,}", *cells, f"{whole:.1f}", runs)
        yield f"| {' | '.join(words)} |"


def _context_rows(pair: PairSpecs, gpu: Gpu) -> Iterator[str]:
    """Decode steps of long requests, by what the ranks divide."""
    clock, works, num_tokens = clock_of(gpu, None), list[EngineWork](), list[str]()
    for fields in ({}, {"attention_dp": True, "max_batch_size": 8}, {"dcp_size": _RANKS}):
        sizes = {"tp_size": _RANKS, "ep_size": _RANKS, "max_seq_len": 262144, "max_num_tokens": _PROMPT_TOKENS}
        config = BuildConfig(target="t", drafter="d", draft_window=_WINDOW, **sizes | fields)
        made = plan_engine(config, pair, gpu)
        works.append(EngineWork(made.pretrained_config, has_drafter=True))
        num_tokens.append(f"{made.num_kv_tokens / 1e6:.2f} million")
    yield f"| K/V tokens | {' | '.join(num_tokens)} | | |"
    for num_requests, context in ((1, 8192), (1, 131072), (1, 250000), (8, 131072), (5, 250000), (24, 131072)):
        requests = (num_requests, -(-num_requests // _RANKS), num_requests)
        steps = (
            ComputedRows.decode(num_requests=number, context_len=context, num_draft_tokens=_K) for number in requests
        )
        divided, own, positions = (clock.time(work.of(step)).device_s for work, step in zip(works, steps, strict=True))
        times = " | ".join(f"{1e3 * each:.1f}" for each in (divided, own, positions))
        yield f"| {num_requests} x {context:,} | {times} | {divided / positions:.2f} | {own / positions:.2f} |"


def _table(*columns: str) -> str:
    return f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"


def main() -> int:
    gpu = gpu_of(sys.argv[1] if len(sys.argv) > 1 else "h200")
    max_batch_size = int(sys.argv[2]) if len(sys.argv) > 2 else 16
    columns = ("divided among 8 ranks", "GiB less a rank", "K/V tokens of tp 8")
    columns += ("us at 1 request a rank", "at 16", "at 1,024 prompt tokens")
    print(_table(*columns))
    with tempfile.TemporaryDirectory() as directory:
        root, names = Path(directory), ("moonshotai/Kimi-K2.6", "z-lab/Kimi-K2.6-DFlash")
        pair = with_draft_window(read_pair(*(write_shape(root, name) for name in names)), _WINDOW)
        for line in _rows(pair, gpu, max_batch_size):
            print(line, flush=True)
        times = ("us a layer at 8 rows a rank", "at 1,024", "at 4,096")
        shared = "GiB more a rank with MLPs for every token whole"
        print("\n" + _table("target", "ranks reached", "counts cheaper from, rows a rank", *times, shared, "runs"))
        for line in _exchange_rows(gpu, root):
            print(line, flush=True)
        columns = ("requests", "tp8ep8, ms a step", "dp8ep8", "tp8ep8dcp8", "as fast as tp8ep8", "as dp8ep8")
        print("\n" + _table(*columns))
        for line in _context_rows(pair, gpu):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
