"""ModelOpt's own exports of a tiny Llama 4: `python -m tests.quantize.llama4_export ROOT`, in a process of its own.

ROOT/text and ROOT/text-bfloat16 are the language model alone. ROOT/seen is made here: the whole model, as published,
which also sees.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Llama4Config, Llama4ForConditionalGeneration

from tests.quantize.modelopt_export import PROMPTS, export_target, with_fp8_kv


def fp8_but(pattern: str, rule: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    config["quant_cfg"] += [{"quantizer_name": f"{pattern}{kind}_quantizer"} | rule for kind in ("weight", "input")]
    return config


NVFP4 = next(rule["cfg"] for rule in mtq.NVFP4_DEFAULT_CFG["quant_cfg"] if "cfg" in rule)
EXPORTS: dict[str, Any] = {
    "fp8": mtq.FP8_DEFAULT_CFG,
    "nvfp4": mtq.NVFP4_DEFAULT_CFG,
    "nvfp4_w4a16": mtq.W4A16_NVFP4_CFG,
    "fp8_w8a16": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    "fp8_block": mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG,
    "mixed": fp8_but("*feed_forward.experts*", {"cfg": NVFP4}),
    "plain-experts": fp8_but("*feed_forward.experts*", {"enable": False}),
}


def export_seen(text: dict[str, Any], output: Path) -> None:
    """NVFP4, and FP8 K/V, as `nvidia/Llama-4-Scout-17B-16E-Instruct-NVFP4` has them."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "projector_input_dim": 32, "projector_output_dim": 32}
    vision = sizes | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "vision_output_dim": 32}
    model = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=vision | {"patch_size": 14}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.config.architectures = [type(model).__name__]
    with torch.no_grad():
        mtq.quantize(model, with_fp8_kv(mtq.NVFP4_DEFAULT_CFG), lambda m: m(input_ids=torch.tensor(PROMPTS)))
        export_hf_checkpoint(model, export_dir=output)


def main(root: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, config in EXPORTS.items():
        export_target(root / "text", root / name, config)
    for name in ("fp8", "nvfp4"):
        export_target(root / "text-bfloat16", root / f"{name}-bfloat16", EXPORTS[name])
    model = AutoModelForCausalLM.from_pretrained(root / "text", dtype="auto", attn_implementation="eager")
    export_seen(model.config.to_dict(), root / "seen")
    with torch.no_grad():  # what ModelOpt itself computes in FP8; it has no NVFP4 on a CPU
        mtq.quantize(model, mtq.FP8_DEFAULT_CFG, lambda m: [m(torch.tensor([prompt])) for prompt in PROMPTS])
        save_file({"logits": model(torch.tensor(PROMPTS[:1])).logits[0]}, root / "fp8.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
