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

import json
import sys
from pathlib import Path

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
    words += [word for speed in ("500", "550", "600") for word in ("--per-user", speed)]
    words += ["--csv", str(directory / "points.csv"), "--figure", str(directory / "points.svg")]
    cli.main([*words, *options])


def _write(directory: Path, config: dict[str, object]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
