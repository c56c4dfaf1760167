"""The tables of a quantized build: the plan before it, sizes per component after it."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from dflash_trt.quantize.plan import PlannedLinear, QuantizationPlan

# Command-line options go into these keys of the YAML's `quantization`.
FLAG_KEYS = {
    "quantization": "target",
    "drafter_quantization": "drafter",
    "head_quantization": "lm_head",
    "kv_cache": "kv_cache",
}


def with_flags(section: Any, flags: dict[str, str]) -> Any:
    """The YAML's `quantization` with the command line's flags in it; unchanged if it is not a mapping."""
    chosen = {FLAG_KEYS[name]: value for name, value in flags.items()}
    if not chosen:
        return section
    if section is None or isinstance(section, str):
        section = {} if section is None else {"target": section}
    return section | chosen if isinstance(section, dict) else section


def plan_table(plan: "QuantizationPlan", dtype: str) -> "Table":
    """Linear by linear; layers that are alike share a row."""
    from rich.table import Table

    table = Table("linear", "count", "in", "format", "of", title="quantization plan", title_justify="left")
    groups: dict[tuple[str, str, str, int], list[PlannedLinear]] = {}
    for linear in plan.linears:
        pattern = re.sub(r"\.layers\.\d+\.", ".layers.*.", linear.name)
        source = "the checkpoint" if linear.is_stored else "this build" if linear.format else ""
        groups.setdefault((pattern, linear.format or dtype, source, linear.spec.shape[-1]), []).append(linear)
    for (pattern, weight_format, source, columns), members in groups.items():
        name = pattern if len(members) == _num_alike(plan, pattern) else _listed(members)
        table.add_row(name, str(len(members)), str(columns), weight_format, source)
    pages = {"target K/V pages": plan.has_fp8_target_kv} | (
        {"draft K/V pages": plan.has_fp8_draft_kv} if plan.draft is not None else {}
    )
    for name, has_fp8 in pages.items():
        table.add_row(name, "", "", "fp8" if has_fp8 else dtype, "")
    return table


def size_table(component_bytes: Sequence[dict[str, Any]], dtype: str) -> "Table":
    """Bytes per component before and after."""
    from rich.filesize import decimal
    from rich.table import Table

    table = Table("component", f"in {dtype}", "in this engine", "ratio", title="weights", title_justify="left")
    total = {"component": "total"} | {
        key: sum(row[key] for row in component_bytes) for key in ("plain_bytes", "planned_bytes")
    }
    for row in (*component_bytes, total):
        plain, planned = row["plain_bytes"], row["planned_bytes"]
        ratio = f"{planned / plain:.3f}" if plain else "added"
        table.add_row(row["component"], decimal(plain), decimal(planned), ratio)
    return table


def _num_alike(plan: "QuantizationPlan", pattern: str) -> int:
    expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return sum(expression.fullmatch(linear.name) is not None for linear in plan.linears)


def _listed(members: "Sequence[PlannedLinear]") -> str:
    """Names of some of the layers, for a row that does not stand for all of them."""
    if len(members) == 1:
        return members[0].name
    indices = [match[1] for linear in members if (match := re.search(r"\.layers\.(\d+)\.", linear.name))]
    return re.sub(r"\.layers\.\d+\.", f".layers.{{{','.join(indices)}}}.", members[0].name)
