"""Compare the snapshot of TensorRT-LLM's arguments with a newer golden manifest of it.

    python scripts/compare_trtllm_manifest.py llm_args_golden_manifest.json

The manifest is `tensorrt_llm/usage/llm_args_golden_manifest.json` of its repository or wheel. Prints the paths of the
snapshot that are gone or changed; exit code 1 if there is any.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SNAPSHOT = Path(__file__).resolve().parents[1] / "tests/data/tensorrt_llm_1.4.0rc1.json"

Arguments = Mapping[str, tuple[str, frozenset[str]]]  # annotation and allowed values, by path


def arguments_of(manifest: Mapping[str, Any]) -> Arguments:
    """Of a golden manifest."""
    rows = manifest["TorchLlmArgs"]
    return {row["path"]: (row["annotation"], frozenset(row["allowed_values"])) for row in rows}


def snapshot_arguments(path: Path = SNAPSHOT) -> Arguments:
    rows = json.loads(path.read_text())["llm_args"]
    return {name: (annotation, frozenset(allowed)) for name, (annotation, allowed) in rows.items()}


def differences(ours: Arguments, newer: Arguments) -> Iterator[str]:
    """What of ours the newer one lacks or has otherwise; more allowed values are no difference."""
    for name, (annotation, allowed) in ours.items():
        if name not in newer:
            yield f"{name}: gone"
            continue
        new_annotation, new_allowed = newer[name]
        lost = ", ".join(sorted(allowed - new_allowed))
        if lost:
            yield f"{name}: no longer {lost}"
        if annotation != new_annotation and not allowed:
            yield f"{name}: {annotation} is now {new_annotation}"


def main(words: list[str]) -> int:
    if len(words) != 1:
        print(__doc__)
        return 2
    found = list(differences(snapshot_arguments(), arguments_of(json.loads(Path(words[0]).read_text()))))
    print("\n".join(found) if found else "every argument of the snapshot is as it was")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
