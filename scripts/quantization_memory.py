#!/usr/bin/env python3
"""Peak memory of a quantized build: writes a random target with the shape of a 1.5B model and builds it.

Usage: scripts/quantization_memory.py WORK_DIR [FORMAT]. About 6 GB of disk; the memory is that of the build process
alone, the pages of mapped files included, as the kernel counts them.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

NUM_LAYERS, HIDDEN, FFN, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 28, 1536, 8960, 151936, 12, 2, 128
MAX_RATIO = 2.2  # of the largest shard
PROMPTS, PROMPT_TOKENS = 2, 64


def write_target(path: Path) -> int:
    """Random bfloat16 weights in one shard; returns its size in bytes."""
    path.mkdir(parents=True)
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()

    def matrix(rows: int, columns: int) -> torch.Tensor:
        repeated = noise.repeat(rows * columns // len(noise) + 1)[: rows * columns].view(rows, columns)
        return repeated.mul_(columns**-0.5)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for i in range(NUM_LAYERS):
        prefix = f"model.layers.{i}"
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", FFN, HIDDEN),
            ("mlp.up_proj", FFN, HIDDEN),
            ("mlp.down_proj", HIDDEN, FFN),
        ):
            tensors[f"{prefix}.{name}.weight"] = matrix(rows, columns)
        for name, size in (
            ("input_layernorm", HIDDEN),
            ("post_attention_layernorm", HIDDEN),
            ("self_attn.q_norm", HEAD_DIM),
            ("self_attn.k_norm", HEAD_DIM),
        ):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(size)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, path / "model.safetensors")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 0,
    }
    (path / "config.json").write_text(json.dumps(config))
    return (path / "model.safetensors").stat().st_size


def main(work: Path, weight_format: str = "fp8") -> None:
    target = work / "target"
    shard_bytes = (target / "model.safetensors").stat().st_size if target.exists() else write_target(target)
    prompts = work / "prompts.jsonl"
    rows = [
        {"prompt_token_ids": [(i * 7919 + j * 104729) % VOCAB for j in range(PROMPT_TOKENS)]} for i in range(PROMPTS)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = work / "build.yaml"
    quantization = {"target": weight_format, "lm_head": weight_format, "calibration": {"prompts": str(prompts)}}
    config.write_text(json.dumps({"target": str(target), "dtype": "bfloat16", "quantization": quantization}))
    words = [sys.executable, "-m", "dflash_trt.cli.main", "build", str(config), "-o", str(work / "engine")]
    started = time.monotonic()
    environment = os.environ | {"XDG_CACHE_HOME": str(work / f"cache-{os.getpid()}")}  # always calibrates
    process = subprocess.Popen([*words, "--overwrite"], env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    peak_bytes = usage.ru_maxrss * 1024
    result = {
        "format": weight_format,
        "shard_bytes": shard_bytes,
        "peak_rss_bytes": peak_bytes,
        "peak_over_shard_ratio": round(peak_bytes / shard_bytes, 3),
        "build_time_s": round(time.monotonic() - started, 1),
        "exit_code": os.waitstatus_to_exitcode(status),
    }
    print(json.dumps(result, indent=1))
    sys.exit(0 if result["exit_code"] == 0 and peak_bytes < MAX_RATIO * shard_bytes else 1)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), *sys.argv[2:])
