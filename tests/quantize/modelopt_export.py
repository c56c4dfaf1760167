"""ModelOpt's own exports of a tiny pair, for the parity tests: run as a script, in a process of its own.

ModelOpt patches classes for the whole process, so it never runs inside pytest. Everything here is ModelOpt's or the
reference implementations' code, used as it is:
`python -m tests.quantize.modelopt_export TARGET DRAFTER EXPERTS OUTPUT`.
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from dflash.model import DFlashDraftModel, extract_context_feature
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant
from transformers import AutoModelForCausalLM

PROMPTS = [[5 + (i * 7 + j * j) % 250 for j in range(24)] for i in range(4)]
BLOCK = 4


def mixed_config() -> dict[str, Any]:
    """FP8, but the MLPs are NVFP4 and the last layer is excluded."""
    config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    nvfp4 = next(rule["cfg"] for rule in mtq.NVFP4_DEFAULT_CFG["quant_cfg"] if "cfg" in rule)
    for pattern in ("*mlp*weight_quantizer", "*mlp*input_quantizer"):
        config["quant_cfg"].append({"quantizer_name": pattern, "cfg": nvfp4})
    config["quant_cfg"].append({"quantizer_name": "*layers.3.*", "enable": False})
    return config


def with_fp8_kv(config: dict[str, Any]) -> Any:
    return update_quant_cfg_with_kv_cache_quant(copy.deepcopy(config), mtq.FP8_KV_CFG["quant_cfg"])


def export_target(source: Path, output: Path, config: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")

    def run(model: Any) -> None:
        for prompt in PROMPTS:
            model(input_ids=torch.tensor([prompt]))

    _export(model, output, config, run)


def export_drafter(target: Path, source: Path, output: Path, config: dict[str, Any]) -> None:
    """Calibrated on real taps of the target, over a block of masks after each prompt."""
    verifier = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    drafter = DFlashDraftModel.from_pretrained(source, dtype="auto")

    def inputs_of(prompt: list[int]) -> dict[str, torch.Tensor]:
        hidden_states = verifier(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        block = torch.tensor([[prompt[-1]] + [drafter.mask_token_id] * (BLOCK - 1)])
        return {
            "target_hidden": extract_context_feature(hidden_states, drafter.target_layer_ids),
            "noise_embedding": verifier.get_input_embeddings()(block),
            "position_ids": torch.arange(len(prompt) + BLOCK)[None],
        }

    def run(model: Any) -> None:
        for prompt in PROMPTS:
            model(**inputs_of(prompt))

    drafter.get_dummy_inputs = lambda: inputs_of(PROMPTS[0])  # the exporter's hook for drafters
    _export(drafter, output, config, run)


def _export(model: Any, output: Path, config: dict[str, Any], run: Callable[[Any], None]) -> None:
    with torch.no_grad():
        mtq.quantize(model, config, run)
        export_hf_checkpoint(model, export_dir=output)


def main(target: Path, drafter: Path, experts: Path, output: Path) -> None:
    torch.set_num_threads(1)
    export_target(experts, output / "experts-fp8", mtq.FP8_DEFAULT_CFG)
    export_target(experts, output / "experts-nvfp4", mtq.NVFP4_DEFAULT_CFG)
    export_target(target, output / "target-fp8", mtq.FP8_DEFAULT_CFG)
    export_target(target, output / "target-nvfp4", mtq.NVFP4_DEFAULT_CFG)
    export_target(target, output / "target-nvfp4_w4a16", mtq.W4A16_NVFP4_CFG)
    export_target(target, output / "target-fp8_w8a16", mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG)
    export_target(target, output / "target-fp8_block", mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG)
    export_target(target, output / "target-fp8-kv", with_fp8_kv(mtq.FP8_DEFAULT_CFG))
    export_target(target, output / "target-mixed", mixed_config())
    export_drafter(target, drafter, output / "drafter-fp8", mtq.FP8_DEFAULT_CFG)
    export_drafter(target, drafter, output / "drafter-nvfp4", mtq.NVFP4_DEFAULT_CFG)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]))
