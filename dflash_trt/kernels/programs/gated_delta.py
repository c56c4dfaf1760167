"""The recurrence of a gated delta net, with its convolution, norm and gate."""

from dataclasses import replace
from typing import Final

from dflash_trt.kernels.programs.pages import CONTEXT_LENS, STATE, STATE_POOLS, TOKEN_OFFSETS
from dflash_trt.kernels.programs.program import Check, FieldRule, Kernel, Launch, Program, Stage, TensorRule, positive

_CONVOLVE: Final = Kernel(
    name="convolve_kernel",
    types={"qkvz": "F"},
    equal={"CHANNELS": "C", "GATES": "H * DV", "TAPS": "W", "RECORDS": "num_records", "POOLED": "1"},
    at_least={"REQUESTS": "R"},
)
_VERIFY: Final = Kernel(
    name="delta_verify_kernel",
    types={"mixed": "F"},
    equal={
        "KEY_HEADS": "num_key_heads",
        "HEADS": "H",
        "KEY_DIM": "(C - H * DV) // (2 * num_key_heads)",
        "VALUE_DIM": "DV",
        "RECORDS": "num_records",
        "POOLED": "1",
    },
)
_PROMPT: Final = replace(_VERIFY, name="delta_prompt_kernel")
_FINISH: Final = replace(
    _VERIFY,
    name="finish_kernel",
    equal={**_VERIFY.equal, "TAPS": "W", "HAS_UNIT_KEYS": "1"},
    at_least={"REQUESTS": "R"},
)
_IN_ORDER: Final = replace(_VERIFY, name="delta_in_order_kernel")
_FINISH_IN_ORDER: Final = replace(_FINISH, equal={**_FINISH.equal, "HAS_UNIT_KEYS": "0"})
GATED_DELTA: Final = Program(
    name="GatedDelta",
    inputs=(
        TensorRule("qkvz", "F [T, C + H * DV]"),
        TensorRule("ba", "F [T, 2 * H]"),
        TensorRule("conv", "F [C, W]"),
        TensorRule("log_rate", "float32 [H]"),
        TensorRule("dt_bias", "float32 [H]"),
        TensorRule("norm", "F [DV]"),
        STATE_POOLS,
        TensorRule("slot_ids", "int64 [R]"),
        *(TOKEN_OFFSETS, CONTEXT_LENS),
    ),
    outputs=(TensorRule("out", "F [T, H * DV]"),),
    fields=(
        STATE,  # the first index of its six
        FieldRule("num_records", 1, 1 << 16),
        FieldRule("num_key_heads", 1, 1 << 16),
        positive("eps"),
    ),
    checks=(
        Check(
            subject="gated delta net",
            holds="C > H * DV and (C - H * DV) % (2 * num_key_heads) == 0 and H % num_key_heads == 0",
            expected="as many channels for keys as for queries, in whole heads",
            found="{C} channels, {num_key_heads} key heads, {H} value heads of {DV}",
            hint="Channels are q, k and v.",
        ),
        Check(
            subject="state_pools",
            holds="states >= state + 6",
            expected="{state + 6} addresses or more",
            found="{states}",
            hint="A state has six, from the node's index on.",
        ),
    ),
    stage=Stage(
        arguments={"filters": "conv", "num_rows": "T", "num_requests": "R", "state_index": "state"}
        # Found at the addresses in state_pools; only their types are used.
        | dict.fromkeys(("state", "keys", "deltas", "decays", "window", "position")),
        scratch={"num_folded": "4 * R", "mixed": "T * C * element_bytes", "attended": "4 * T * H * DV"},
        launches=(
            Launch(kernel=_CONVOLVE),
            Launch(kernel=_VERIFY),
            # A node does not know the rows of each request: in steps that may have a prompt, all of them are looked at.
            Launch(kernel=_PROMPT, when="T > num_records"),
            Launch(kernel=_FINISH),
        ),
    ),
)
# Token by token: a row's bits depend on the tokens before it alone.
GATED_DELTA_IN_ORDER: Final = replace(
    GATED_DELTA,
    name="GatedDeltaInOrder",
    stage=replace(
        GATED_DELTA.stage, launches=tuple(Launch(kernel=kernel) for kernel in (_CONVOLVE, _IN_ORDER, _FINISH_IN_ORDER))
    ),
)
