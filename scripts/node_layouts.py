"""Layouts of a node for targets with experts, as `dflash-trt plan` has them: the table of docs/scaling.md.

PYTHONPATH=. python scripts/node_layouts.py [GPU ...]

Config files are the publishers' where aiconfigurator-core is installed, as in tests. Without a GPU nothing is measured.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.checkpoint.specs import PairSpecs
from dflash_trt.core.config import BuildConfig
from dflash_trt.plan.gpus import GPUS_PER_NODE, gpu_of
from dflash_trt.plan.step_costs import clock_of
from dflash_trt.simulation.acceptance import AcceptanceByPosition
from dflash_trt.simulation.advice import Goal, Layout, choices, layouts
from dflash_trt.simulation.load import Lengths
from scripts.published_shapes import write_config

_RATE: Final = 0.8  # of drafts, after an accepted one
_GOALS: Final = (50.0, 100.0, 200.0)  # tok/s per user
_LENGTHS: Final = Lengths(num_prompt_tokens=4096, num_output_tokens=1024)
_SHORT_LENGTHS: Final = Lengths(num_prompt_tokens=1024, num_output_tokens=512)  # where attention beyond is sparse
_MOST_DENSE_TOKENS: Final = 2048
_NAMES: Final = ("tp8x1", "tp8ep8x1", "dp8ep8x1", "tp1x8")
TARGETS: Final = (
    ("moonshotai/Kimi-K2.6", "z-lab/Kimi-K2.6-DFlash"),
    ("deepseek-ai/DeepSeek-V3", None),
    ("zai-org/GLM-5-FP8", None),
    ("openai/gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash"),
    ("Qwen/Qwen3.5-397B-A17B", "z-lab/Qwen3.5-397B-A17B-DFlash"),
)


def _found(pair: PairSpecs, gpu: str, lengths: Lengths) -> dict[str, Layout]:
    """By name, of the largest batch that fits; no prefill workers."""
    max_seq_len = min(131072, pair.target.max_position_embeddings)
    config = BuildConfig(target="t", max_batch_size=256, max_num_tokens=4096, max_seq_len=max_seq_len)
    acceptance = None
    if pair.draft is not None:
        acceptance = AcceptanceByPosition(tuple(_RATE**i for i in range(1, pair.draft.max_draft_len + 1)))
    goal = Goal(num_gpus=GPUS_PER_NODE, lengths=lengths)
    found, _ = layouts(config, [(pair, acceptance)], clock_of(gpu_of(gpu), None), goal)
    return {layout.name: layout for layout in found if layout.format is None and not layout.num_prefill_workers}


def _rows(target: str, drafter: str | None, gpus: Sequence[str], root: Path) -> Iterator[str]:
    pair = read_pair(write_config(root, target), None if drafter is None else write_config(root, drafter))
    lengths = _SHORT_LENGTHS if pair.target.max_position_embeddings <= _MOST_DENSE_TOKENS else _LENGTHS
    found = {gpu: _found(pair, gpu, lengths) for gpu in gpus}
    for name in _NAMES:
        if any(name in of_gpu for of_gpu in found.values()):
            cells = [_cell(of_gpu.get(name), lengths) for of_gpu in found.values()]
            yield f"| {target.partition('/')[2]} | {name} | {' | '.join(cells)} |"


def _cell(layout: Layout | None, lengths: Lengths) -> str:
    """K/V tokens, and tok/s for each goal."""
    if layout is None:
        return "-"
    speeds = []
    for per_user in _GOALS:
        best = choices([layout], Goal(num_gpus=GPUS_PER_NODE, lengths=lengths, per_user=per_user))
        speeds.append(f"{best[0].speed.output_tok_per_s:,.0f}" if best else "-")
    return f"{layout.num_replicas * layout.made.num_kv_tokens / 1e6:.2f} M: {'; '.join(speeds)}"


def main() -> int:
    gpus = sys.argv[1:] or ["h200", "b300"]
    goals = ", ".join(f"{per_user:g}" for per_user in _GOALS)
    columns = (f"8 x {gpu.upper()}: K/V tokens; tok/s at {goals} per user" for gpu in gpus)
    print(f"| target | layout | {' | '.join(columns)} |")
    print(f"|---|---{'|---' * len(gpus)}|")
    with tempfile.TemporaryDirectory() as directory:
        for target, drafter in TARGETS:
            for line in _rows(target, drafter, gpus, Path(directory)):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
