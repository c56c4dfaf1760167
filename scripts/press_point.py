#!/usr/bin/env python3
"""What the simulation says of the press's point: gpt-oss-120b on 8 x B300 at 500 to 600 tok/s per user.

Usage: scripts/press_point.py OUT_DIR [MORE OPTIONS OF plan]. It writes points.csv and points.svg there; nothing of it
is measured. The claim is NVIDIA's, of 2026-06-23: SPEED-Bench coding, more than 15 times the throughput of
autoregressive decoding and 1.5 times EAGLE-3's
(developer.nvidia.com/blog/boost-inference-performance-up-to-15x-on-nvidia-blackwell-using-dflash-speculative-decoding).

Acceptance of the drafter: its card says 3.1, 3.8 and 4.4 tokens per step of HumanEval with blocks of 4, 6 and 10; the
fractions by position below have these sums, and are falling otherwise by guess. The EAGLE-3 head and how far its drafts
are accepted are not published in this detail: one layer of the target's width, 2.6 tokens per step with three drafts.
"""

import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from dflash_trt.bench.pareto import Point, frontier, per_gpu_at
from dflash_trt.cli.main import cli

CONFIGS = Path(__file__).parent / "full_size"
DFLASH = "0.85,0.70,0.55,0.40,0.30,0.22,0.17,0.12,0.09"
EAGLE = "0.74,0.51,0.35"
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 17280,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "vocab_size": 201088,
    "draft_vocab_size": 32000,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 33]},
}
LOADS = "8,16,32,64,128,256,512"


def run(directory: Path, options: list[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("gpt-oss-120b", "gpt-oss-120b-DFlash"):
        _write(directory / name, json.loads((CONFIGS / f"{name}.json").read_text()))
    _write(directory / "eagle3-head", HEAD)
    words = [
        "plan",
        str(directory / "gpt-oss-120b"),
        str(directory / "gpt-oss-120b-DFlash"),
        "--gpu",
        "b300",
        "--sweep",
    ]
    words += ["--other-drafter", str(directory / "eagle3-head"), "--accepted", DFLASH, "--accepted", EAGLE]
    words += [word for layout in ("tp1x8", "tp2ep2x4", "tp4ep4x2", "tp8ep8") for word in ("--layout", layout)]
    words += [word for length in ("3", "5", "9") for word in ("--sweep-draft-length", length)]
    words += ["--max-batch-size", "512", "--max-seq-len", "4096", "--max-num-tokens", "4096", "--concurrency", LOADS]
    words += ["--prompt-tokens", "512", "--output-tokens", "512", "--requests-per-client", "2"]
    words += [word for speed in ("300", "450", "600") for word in ("--per-user", speed)]
    words += ["--csv", str(directory / "points.csv"), "--figure", str(directory / "points.svg")]
    cli.main([*words, *options], standalone_mode=False)
    print(*table(directory / "points.csv"), sep="\n")


def table(points: Path) -> Iterator[str]:
    """tok/s per GPU of each drafter's best configurations at speeds per user."""
    found: dict[str, list[Point]] = defaultdict(list)
    with points.open() as stream:
        for row in csv.DictReader(stream):
            speeds = float(row["tok_per_s_per_user"]), float(row["output_tok_per_s_per_gpu"])
            found[row["drafter"]].append(Point(per_user=speeds[0], per_gpu=speeds[1], label=""))
    names = ("AR", "EAGLE-3", "DFlash")
    yield "| simulated, tok/s per GPU at | AR | EAGLE-3, K = 3 | DFlash, K = 3, 5, 9 | DFlash / AR | DFlash / EAGLE-3 |"
    yield "|---|---:|---:|---:|---:|---:|"
    for per_user in (200, 300, 400, 450, 500, 550, 600):
        best = [per_gpu_at(frontier(found[name]), per_user) for name in names]
        plain, eagle, dflash = best
        ratios = ["" if other is None or dflash is None else f"{dflash / other:.3g}" for other in (plain, eagle)]
        cells = ["not reached" if value is None else f"{value:.0f}" for value in best]
        yield f"| {per_user} tok/s per user | {' | '.join([*cells, *ratios])} |"


def _write(directory: Path, config: dict[str, object]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
