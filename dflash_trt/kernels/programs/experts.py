"""A mixture of experts after its router: choice, both products, and the weighted sum."""

from typing import Final

from dflash_trt.kernels.programs.program import (
    Check,
    Constant,
    Expression,
    FieldRule,
    Kernel,
    Launch,
    Program,
    Stage,
    TensorRule,
    flag,
    positive,
)


def _matrix(prefix: str, *, rows: str, columns: str, input_scales: str) -> tuple[TensorRule, ...]:
    """The inputs of one weight of all experts, of `rows` output features and `columns` input features."""
    form = f"{prefix}_form"
    return (
        TensorRule(f"{prefix}_codes", f"int8 [E, {rows}, row_bytes({form}, {columns}, element_bytes)]"),
        TensorRule(
            f"{prefix}_block_scale",
            f"int8 [E, {prefix}_scale_rows, block_row_bytes({form}, {columns})]",
            when=f"{form} >= FP8_BLOCK and {form} <= INT4",
        ),
        TensorRule(f"{prefix}_block_rows", f"[{rows}]", when=f"{form} == FP8_BLOCK"),
        TensorRule(f"{prefix}_row_scale", f"float32 [E, {rows}]", when=f"{prefix}_has_row_scale == 1"),
        TensorRule(f"{prefix}_input_scale", f"float32 [E, {input_scales}]", when=f"{prefix}_has_input_scale == 1"),
        TensorRule(f"{prefix}_bias", f"F [E, {rows}]", when=f"{prefix}_has_bias == 1"),
    )


def _matrix_fields(prefix: str) -> tuple[FieldRule, ...]:
    flags = ("has_row_scale", "has_input_scale", "has_bias")
    return FieldRule(f"{prefix}_form", 0, 6), *(flag(f"{prefix}_{name}") for name in flags)


def _product(
    prefix: str, *, name: str, of_f: str, equal: dict[str, Expression], codes: dict[str, Expression]
) -> Launch:
    """A product of all experts with the weight `prefix`.

    `of_f` is an argument of type F. `codes` has scratch memory by argument, for an input in INT8.
    """
    kernel = Kernel(
        name=name,
        types={of_f: "F"},
        equal={
            "FORM": f"{prefix}_form",
            "HAS_ROW_SCALE": f"{prefix}_has_row_scale",
            "HAS_BIAS": f"{prefix}_has_bias",
            "FFN": "I",
            "SCALES_INPUTS": "scales_inputs",
        }
        | equal,
        sized={"TOKENS": "tokens"},
    )
    names = ("codes", "block_scale", "block_rows", "row_scale", "input_scale", "bias")
    arguments = {name: f"{prefix}_{name}" for name in names} | {"num_block_rows": f"{prefix}_scale_rows"}
    given = {name: f"{memory} if {_in_int8(prefix)} else {arguments.get(name, name)}" for name, memory in codes.items()}
    return Launch(kernel=kernel, arguments=arguments | given)


def _in_int8(prefix: str) -> Expression:
    return f"{prefix}_form == INT8"


def _check_block_scale(prefix: str, rows: Expression) -> Check:
    return Check(
        subject=f"{prefix}_block_scale",
        holds=f"{prefix}_form <= FP8_BLOCK or {_in_int8(prefix)} or {prefix}_scale_rows == {rows}",
        expected=f"{{{rows}}} rows of an expert",
        found=f"{{{prefix}_scale_rows}}",
        hint="Blocks have a row of scales for every output feature.",
    )


_ROUTING: Final = Kernel(
    name="routing_kernel",
    types={"logits": "F"},
    equal={
        "num_experts": "num_experts",
        "num_chosen": "num_chosen",
        "KIND": "routing",
        "NORMALIZES": "normalizes",
        "HAS_BIAS": "has_choice_bias",
        "num_groups": "num_groups",
        "num_chosen_groups": "num_chosen_groups",
    },
    sized={"TOKENS": "tokens"},
)
_TOKEN_CODES: Final = Kernel(name="token_codes_kernel", types={"x": "F"})
_SUM: Final = Kernel(
    name="expert_sum_kernel",
    types={"results": "F"},
    equal={"num_chosen": "num_chosen", "HIDDEN_SIZE": "C", "FEW": "E != num_experts"},
)
# Every size grows with the rows: tiles of the workspace are counted as if they were the smallest.
_STAGE: Final = Stage(
    sizes={
        "entries": "N * num_chosen",
        "widens_gate_up": "gate_up_form != PLAIN and gate_up_form != INT8",
        "widens_down": "down_form != PLAIN and down_form != INT8",
        "tokens": "MIN_TILE_TOKENS if has_fixed_tiles == 1"
        " else tile_tokens(entries, num_experts, is_float32 == 1 and (widens_gate_up or widens_down))",
        "programs": Constant(name="ROWS", kernel=_ROUTING),
        "capacity": Constant(name="EXPERTS", kernel=_ROUTING),
    },
    arguments={
        "num_rows": "N",
        "num_tiles": "max_tiles(entries, E, tokens)",
        "num_here": "E",
        "num_columns": "C",
        "hidden_scale": "down_input_scale",
        "factor": "routing_scale",
    },
    scratch={
        "ticket": "4",
        **dict.fromkeys(("expert_ids", "weights", "order", "ranks"), "4 * entries"),
        "tiles": "4 * 3 * max_tiles(entries, E, MIN_TILE_TOKENS)",
        "counts": "4 * (ceil_div(N, programs) + 1) * capacity",
        "hidden": "entries * I * element_bytes",
        "hidden_block_scale": "entries * I // 16 + 1",
        "results": "entries * C * element_bytes",
        "x_codes": f"(entries if scales_inputs == 1 else N) * C if {_in_int8('gate_up')} else 0",
        "x_scales": f"4 * entries if {_in_int8('gate_up')} else 0",
        "hidden_codes": f"entries * I if {_in_int8('down')} else 0",
        "hidden_scales": f"4 * entries if {_in_int8('down')} else 0",
    },
    launches=(
        Launch(kernel=Kernel(name="reset_ticket_kernel")),  # the workspace holds anything
        Launch(kernel=_ROUTING),
        Launch(
            kernel=_TOKEN_CODES,
            arguments={"codes": "x_codes", "scales": "x_scales"},
            when=f"{_in_int8('gate_up')} and scales_inputs == 0",
        ),
        Launch(
            kernel=Kernel(name="entry_codes_kernel", types={"x": "F"}, equal={"num_chosen": "num_chosen"}),
            arguments={"codes": "x_codes", "scales": "x_scales"},
            when=f"{_in_int8('gate_up')} and scales_inputs == 1",
        ),
        _product(
            "gate_up",
            name="expert_gate_up_kernel",
            of_f="bias",
            codes={"x": "x_codes", "input_scale": "x_scales"},
            equal={
                "IN": "C",
                "num_chosen": "num_chosen",
                "INPUT": f"2 if {_in_int8('gate_up')} else gate_up_has_input_scale",  # CODES, ROUNDED_HERE
                "SPLITS_INPUT": "gate_up_has_input_scale == 1 and input_scales == 2",
                "HIDDEN": "0 if down_has_input_scale == 0 else 2 if down_form == NVFP4 else 1",
                "ACTIVATION": "activation",
            },
        ),
        Launch(
            kernel=_TOKEN_CODES,
            arguments={
                "x": "hidden",
                "codes": "hidden_codes",
                "scales": "hidden_scales",
                "num_rows": "entries",
                "num_columns": "I",
            },
            when=_in_int8("down"),
        ),
        _product(
            "down",
            name="expert_down_kernel",
            of_f="results",
            codes={"hidden": "hidden_codes", "hidden_block_scale": "hidden_scales"},
            equal={
                "HIDDEN_SIZE": "C",
                "INPUT": f"2 if {_in_int8('down')} else 2 * down_has_input_scale",  # CODES, of the launch before
            },
        ),
        Launch(kernel=_SUM, arguments={"num_experts": "E"}),
    ),
)

EXPERTS: Final = Program(
    name="Experts",
    inputs=(
        TensorRule("x", "F [N, C]"),
        TensorRule("logits", "F [N, num_experts]"),
        TensorRule("choice_bias", "float32 [num_experts]", when="has_choice_bias == 1"),
        *_matrix("gate_up", rows="2 * I", columns="C", input_scales="input_scales"),
        *_matrix("down", rows="C", columns="I", input_scales="1"),
    ),
    outputs=(TensorRule("out", "F [N, C]"),),
    fields=(
        FieldRule("first_expert", 0, 4095),
        FieldRule("num_chosen", 1, 4096),
        FieldRule("routing", 0, 2),
        *(flag("normalizes"), flag("has_choice_bias")),
        *(FieldRule("num_groups", 1, 4096), FieldRule("num_chosen_groups", 1, 4096)),
        FieldRule("activation", 0, 2),
        *(flag("scales_inputs"), flag("has_fixed_tiles")),
        *_matrix_fields("gate_up"),
        *_matrix_fields("down"),
        *(positive("routing_scale"), positive("limit"), positive("alpha")),
    ),
    checks=(
        _check_block_scale("gate_up", "2 * I"),
        _check_block_scale("down", "C"),
        Check(
            subject="gate_up_input_scale",
            holds="gate_up_has_input_scale == 0 or input_scales <= 2",
            expected="1 or 2 of an expert",
            found="{input_scales}",
            hint="Gate and up have one each, or one together.",
        ),
        Check(
            subject="experts",
            holds="num_chosen <= num_experts",
            expected="at most as many chosen as there are",
            found="{num_chosen} chosen of {num_experts}",
            hint="Logits are [N, experts].",
        ),
        Check(
            subject="groups of experts",
            holds="num_experts % num_groups == 0 and num_chosen_groups <= num_groups"
            " and num_chosen_groups * (num_experts // num_groups) >= num_chosen",
            expected="some of equal groups, with {num_chosen} experts",
            found="{num_chosen_groups} of {num_groups}",
            hint="num_groups divides num_experts, and the chosen ones hold num_chosen.",
        ),
        Check(
            subject="experts of this rank",
            holds="first_expert + E <= num_experts",
            expected="some of {num_experts}",
            found="{E} from {first_expert} on",
            hint="first_expert and the weights are of different ranks.",
        ),
    ),
    stage=_STAGE,
)
