"""Linear layers of integers; a linear layer of fixed tiles and a norm, for engines built with `--deterministic`.

A row of any of them has the same bits in every step.
"""

from typing import Final

from dflash_trt.kernels.programs.program import (
    Check,
    FieldRule,
    Kernel,
    Launch,
    Program,
    Stage,
    TensorRule,
    flag,
    positive,
)

_HAS_INPUT_SCALE: Final = "has_input_scale == 1"
LINEAR: Final = Program(
    name="Linear",
    inputs=(
        TensorRule("x", "F [N, C]"),
        TensorRule("codes", "int8 [O, row_bytes(form, C, element_bytes)]"),
        TensorRule("block_scale", "int8 [scale_rows, block_row_bytes(form, C)]", when="form >= FP8_BLOCK"),
        TensorRule("block_rows", "[O]", when="form == FP8_BLOCK"),
        TensorRule("row_scale", "float32 [O]", when="has_row_scale == 1"),
        TensorRule("input_scale", "float32 [1]", when=_HAS_INPUT_SCALE),
        TensorRule("bias", "F [O]", when="has_bias == 1"),
    ),
    outputs=(TensorRule("out", "F [N, O]"),),
    fields=(FieldRule("form", 0, 5), flag("has_row_scale"), flag("has_input_scale"), flag("has_bias")),
    checks=(
        Check(
            subject="block_scale",
            holds="form <= FP8_BLOCK or scale_rows == O",
            expected="{O} rows",
            found="{scale_rows}",
            hint="Blocks have a row of scales for every output feature.",
        ),
    ),
    stage=Stage(
        arguments={"num_rows": "N", "num_columns": "C", "num_block_rows": "scale_rows", "scale": "input_scale"},
        scratch={"x_codes": "N * C * has_input_scale", "x_block_scale": "(N * C // 16 + 1) * has_input_scale"},
        launches=(
            Launch(
                kernel=Kernel(
                    name="quantize_rows_kernel", types={"x": "F"}, equal={"RESULT": "2 if form == NVFP4 else 1"}
                ),
                arguments={"result": "x_codes", "block_scale": "x_block_scale"},
                when=_HAS_INPUT_SCALE,
            ),
            Launch(
                kernel=Kernel(
                    name="packed_linear_kernel",
                    types={"out": "F"},
                    equal={
                        "IN": "C",
                        "OUT_SIZE": "O",
                        "FORM": "form",
                        "INPUT": "2 * has_input_scale",  # CODES
                        "HAS_ROW_SCALE": "has_row_scale",
                        "HAS_BIAS": "has_bias",
                    },
                ),
                arguments={"x": "x_codes if has_input_scale == 1 else x"},
            ),
        ),
    ),
)
INT8_LINEAR: Final = Program(
    name="Int8Linear",
    inputs=(
        TensorRule("x", "F [N, C]"),
        TensorRule("codes", "int8 [O, C]"),
        TensorRule("weight_scale", "float32 [O]"),
        TensorRule("bias", "F [O]", when="has_bias == 1"),
    ),
    outputs=(TensorRule("out", "F [N, O]"),),
    fields=(flag("has_bias"),),
    stage=Stage(
        sizes={"tokens": "int8_tile_tokens(N)"},
        scratch={"x_codes": "N * C", "x_scale": "4 * N"},
        arguments={"num_rows": "N", "num_columns": "C"},
        launches=(
            Launch(
                kernel=Kernel(name="token_codes_kernel", types={"x": "F"}),
                arguments={"codes": "x_codes", "scales": "x_scale"},
            ),
            Launch(
                kernel=Kernel(
                    name="int8_linear_kernel",
                    types={"out": "F"},
                    equal={"IN": "C", "OUT_SIZE": "O", "HAS_BIAS": "has_bias"},
                    sized={"TOKENS": "tokens"},
                ),
                arguments={"x": "x_codes"},
            ),
        ),
    ),
)
RMS_NORM: Final = Program(
    name="RmsNorm",
    inputs=(TensorRule("x", "F [N, C]"), TensorRule("weight", "float32 [C]")),
    outputs=(TensorRule("normed", "F [N, C]"),),
    fields=(positive("eps"),),
    stage=Stage(
        arguments={"num_rows": "N", "x_stride": "C", "hidden_size": "C", "block_scale": None, "scale": None},
        launches=(
            Launch(
                kernel=Kernel(
                    name="rms_norm_kernel",
                    types={"x": "F", "weight": "float32"},
                    equal={"RESULT": "0"},  # AS_THEY_ARE
                    at_least={"BLOCK": "C"},
                )
            ),
        ),
    ),
)
