"""The tables of docs/ and CONTRIBUTING.md that follow from code.

Run it to write them again: `python -m scripts.docs_tables`.
"""

import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from dflash_trt.core.exit_codes import ExitCode
from dflash_trt.core.runtime_config import RuntimeConfig, option_of, value_type
from dflash_trt.core.sampling import SAMPLING_FIELDS
from dflash_trt.servers.triton.metrics import METRICS
from dflash_trt.servers.triton.tensors import documentation_tables
from scripts import import_rules

ROOT = Path(__file__).resolve().parents[1]


def tables() -> dict[str, tuple[str, ...]]:
    """Generated tables by page. The header row of a table is its name: a page has it once."""
    return {
        "CONTRIBUTING.md": (import_rules.markdown(),),
        "docs/deployment.md": (*documentation_tables(), _metrics()),
        "docs/exit_codes.md": (_exit_codes(),),
        "docs/settings.md": (_settings(), _sampling()),
    }


def written_again(page: str, table: str) -> str:
    """The page with this table instead of its own of the same header."""
    header = table.partition("\n")[0]
    before, found, after = page.partition(f"{header}\n")
    if not found:
        raise SystemExit(
            f"expected a table that begins with this line, found none. Add the line to the page.\n{header}"
        )
    rows = after.splitlines(keepends=True)
    num_rows = next((i for i, row in enumerate(rows) if not row.startswith("|")), len(rows))
    return f"{before}{table}\n{''.join(rows[num_rows:])}"


def _markdown(header: str, rows: list[list[str]]) -> str:
    line = "|---" * (header.count("|") - 1) + "|"
    return "\n".join([header, line, *(f"| {' | '.join(row)} |" for row in rows)])


def _metrics() -> str:
    rows = []
    for metric in METRICS:
        label = f"; label `{metric.label}`" if metric.label else ""
        rows.append([f"`{metric.name}`", metric.kind.lower(), metric.help + label])
    return _markdown("| metric | kind | meaning |", rows)


def _settings() -> str:
    rows = []
    for name, field in RuntimeConfig.model_fields.items():
        option = option_of(name)
        flag = option.flag or f"--{name.replace('_', '-')}"
        rows.append([f"`{name}`", f"`{flag}`", _type_name(value_type(name)), f"`{field.default}`", option.help])
    return _markdown("| setting | option | type | default | meaning of the option |", rows)


def _sampling() -> str:
    rows = []
    for field in SAMPLING_FIELDS:
        kind = f"list of {field.kind.__name__}" if field.is_list else field.kind.__name__
        rows.append([f"`{field.name}`", kind, f"`{field.default}`", field.help])
    return _markdown("| sampling parameter | type | default | meaning |", rows)


def _exit_codes() -> str:
    rows = [[str(code.value), code.words, code.meaning] for code in ExitCode]
    return _markdown("| exit code | name | meaning |", rows)


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(f"`{word}`" for word in get_args(kind))
    return "mapping" if get_origin(kind) is dict else str(kind.__name__)


def main() -> int:
    for name, generated in tables().items():
        path = ROOT / name
        page = path.read_text()
        for table in generated:
            page = written_again(page, table)
        if page != path.read_text():
            path.write_text(page)
            print(f"{name}: written again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
