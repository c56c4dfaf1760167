#!/usr/bin/env python3
"""Builds the demo pair in every format and compares each engine with float32: the table of docs/quantization.md.

Usage: scripts/quantization_table.py WORK_DIR [NUM_PROMPTS] [MAX_NEW_TOKENS]. Calls `dflash-trt` for everything it
says; leaves the engines, results.json and table.md in WORK_DIR.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "dflash_trt" / "demo"
COMMAND = [sys.executable, "-m", "dflash_trt.cli.main"]

Variant = tuple[str, str, dict[str, Any] | None]  # name, dtype, the `quantization` key

FP8_HEADS = {"lm_head": "fp8"}
VARIANTS: tuple[Variant, ...] = (
    ("fp32", "float32", None),
    ("bf16", "bfloat16", None),
    ("fp32, drafter fp8", "float32", {"target": "none", "drafter": "fp8"}),
    ("fp32, drafter nvfp4", "float32", {"target": "none", "drafter": "nvfp4"}),
    ("bf16, drafter fp8", "bfloat16", {"target": "none", "drafter": "fp8"}),
    ("fp8, drafter plain", "float32", {"target": "fp8", "drafter": "none"}),
    ("fp8", "float32", {"target": "fp8"}),
    ("fp8 + lm_head fp8", "float32", {"target": "fp8", **FP8_HEADS}),
    ("fp8 + drafter's lm_head nvfp4", "float32", {"target": "fp8", "draft_lm_head": "nvfp4"}),
    ("fp8 + K/V fp8", "float32", {"target": "fp8", "kv_cache": "fp8"}),
    ("fp8, drafter nvfp4", "float32", {"target": "fp8", "drafter": "nvfp4"}),
    ("int8", "float32", {"target": "int8"}),
    ("int8 + lm_head int8", "float32", {"target": "int8", "lm_head": "int8"}),
    ("nvfp4, drafter plain", "float32", {"target": "nvfp4", "drafter": "none"}),
    ("nvfp4", "float32", {"target": "nvfp4"}),
    ("nvfp4, drafter fp8", "float32", {"target": "nvfp4", "drafter": "fp8"}),
    ("nvfp4 + lm_head fp8", "float32", {"target": "nvfp4", **FP8_HEADS}),
    ("nvfp4_w4a16, drafter plain", "float32", {"target": "nvfp4_w4a16", "drafter": "none"}),
    ("nvfp4_w4a16", "float32", {"target": "nvfp4_w4a16"}),
)


def run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}\n{done.stderr}")
    return done.stdout


def build(work: Path, index: int, variant: Variant) -> tuple[Path, dict[str, Any]]:
    name, dtype, quantization = variant
    config: dict[str, Any] = {"target": str(DEMO / "target"), "drafter": str(DEMO / "drafter"), "dtype": dtype}
    if quantization is not None:
        config["quantization"] = quantization
    path = work / f"{index}.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    engine = work / f"engine-{index}"
    words = [*COMMAND, "build", str(path), "-o", str(engine), "--overwrite", "--json"]
    print(f"building {name}", file=sys.stderr)
    return engine, json.loads(run(words))


def evaluate(engine: Path, baseline: Path, prompts: Path, max_new_tokens: str) -> dict[str, Any]:
    words = [*COMMAND, "eval", str(engine), "--against", str(baseline), "--input-file", str(prompts)]
    result: dict[str, Any] = json.loads(run([*words, "--max-new-tokens", max_new_tokens, "--json"]))
    return result


def row(name: str, summary: dict[str, Any], result: dict[str, Any]) -> str:
    megabytes = sum(part["planned_bytes"] for part in summary["component_bytes"]) / 1e6
    accepted = result["candidate_acceptance"]
    cells = (
        name,
        f"{megabytes:.1f}",
        f"{result['token_agreement_fraction']:.4f}",
        f"{result['kl_nats']:.2g}",
        f"{result['candidate_perplexity']:.4f}",
        f"{accepted['acceptance_length']:.3f} ({accepted['num_verify_steps']})",
        f"{result['acceptance_ratio']:.3f}",
    )
    return f"| {' | '.join(cells)} |"


def main(work: Path, num_prompts: str = "64", max_new_tokens: str = "96") -> None:
    work.mkdir(parents=True, exist_ok=True)
    prompts = work / "prompts.jsonl"
    prompts.write_text(run([sys.executable, "-m", "scripts.train_demo.prompts", "--num-prompts", num_prompts]))
    baseline, results, rows = Path(), [], []
    for index, variant in enumerate(VARIANTS):
        engine, summary = build(work, index, variant)
        baseline = engine if index == 0 else baseline
        result = evaluate(engine, baseline, prompts, max_new_tokens)
        results.append({"variant": variant, "build": summary, "eval": result})
        rows.append(row(variant[0], summary, result))
        print(rows[-1], file=sys.stderr)
    first = results[0]["eval"]
    counts = f"{first['num_generated_positions']} generated and {first['num_prompt_positions']} prompt positions"
    head = "| engine | weights (MB) | agreement | KL (nats) | perplexity | acceptance length (steps) | ratio |"
    table = [head, "|---|---:|---:|---:|---:|---:|---:|", *rows, "", f"{first['num_prompts']} prompts, {counts}."]
    (work / "table.md").write_text("\n".join(table) + "\n")
    (work / "results.json").write_text(json.dumps(results, indent=1))
    print("\n".join(table))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), *sys.argv[2:])
