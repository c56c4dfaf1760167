"""The kernels of gated delta nets as they are launched: to be compiled ahead and looked at."""

import torch

from dflash_trt.core.state_spec import Recurrent
from dflash_trt.kernels import gated_delta, gated_delta_ends
from dflash_trt.kernels import gated_delta_launch as launch
from plugins.aot.variant import KernelVariant, pointer

FLOAT32_ARGUMENTS = ("log_rate", "dt_bias", "state", "keys", "deltas", "decays", "attended")
INT32_ARGUMENTS = ("token_offsets", "context_lens", "num_folded", "position")
SCALARS = {"eps": "fp32"} | dict.fromkeys(("num_rows", "num_requests", "state_index"), "i32")


def gated_delta_variants(
    spec: Recurrent, dtype: torch.dtype, *, num_requests: int, is_pooled: bool
) -> tuple[KernelVariant, ...]:
    """In the order of their launches. Grids use num_requests and num_rows; `is_pooled`: the state is at addresses."""
    types = (
        SCALARS
        | dict.fromkeys(FLOAT32_ARGUMENTS, pointer(torch.float32))
        | dict.fromkeys(INT32_ARGUMENTS, pointer(torch.int32))
        | dict.fromkeys(("slot_ids", "state_pools"), pointer(torch.int64))
    )
    channel_blocks = -(-spec.num_channels // launch.CHANNELS)
    head_blocks = -(-spec.num_value_heads // launch.HEADS)
    kernels = {
        "convolve": (gated_delta_ends.convolve_kernel, launch.convolve_constants(spec, num_requests)),
        "delta_verify": (gated_delta.delta_verify_kernel, launch.verify_constants(spec)),
        "delta_prompt": (gated_delta.delta_prompt_kernel, launch.prompt_constants(spec)),
        "finish": (gated_delta_ends.finish_kernel, launch.finish_constants(spec, num_requests)),
    }
    grids = {
        "convolve": ("num_rows", str(channel_blocks), "1"),
        "finish": ("num_rows + num_requests", str(max(head_blocks, channel_blocks)), "1"),
    }
    warps = {"delta_verify": launch.VERIFY_WARPS, "delta_prompt": launch.PROMPT_WARPS}
    variants = []
    for name, (kernel, constants) in kernels.items():
        columns = -(-spec.value_head_dim // constants.get("BLOCK_V", 1))
        constexprs = constants | {"POOLED": is_pooled}
        variants.append(
            KernelVariant(
                name=name,
                kernel=kernel,
                signature={
                    argument: types.get(argument, pointer(dtype))
                    for argument in kernel.arg_names
                    if argument not in constexprs
                },
                constexprs=constexprs,
                num_warps=warps.get(name, launch.END_WARPS),
                num_stages=launch.NUM_STAGES if name in warps else 1,
                grid=grids.get(name, ("num_requests", str(spec.num_value_heads), str(columns))),
            )
        )
    return tuple(variants)
