from pathlib import Path

import pytest

from scripts.import_rules import PACKAGE, ROOT, RULES, markdown, violations


def test_every_import_of_the_package_is_allowed() -> None:
    assert violations(ROOT / PACKAGE) == []


def test_the_page_for_contributors_has_the_rules() -> None:
    assert markdown() in (ROOT / "CONTRIBUTING.md").read_text()


def test_a_package_imports_only_packages_above_it() -> None:
    """So there can be no cycle."""
    above: set[str] = set()
    for name, rule in RULES.items():
        assert rule.packages <= above, name
        above.add(name)


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        (
            "scheduler/x.py",
            "from dflash_trt.executor.opening import X",
            "scheduler may import core, not dflash_trt.exec",
        ),
        ("executor/x.py", "from dflash_trt import scheduler", "not dflash_trt.scheduler"),
        ("core/x.py", "import dflash_trt.checkpoint.pair", "core may import nothing, not dflash_trt.checkpoint"),
        ("core/x.py", "if TYPE_CHECKING:\n    import torch", "not torch"),
        ("scheduler/x.py", "def f():\n    import torch", "scheduler may import numpy from outside, not torch"),
        ("network/decoder.py", "import torch", "not torch (in a file of this name)"),
        ("backends/torch/ops.py", "import tensorrt", "not tensorrt"),
        ("serving/llm.py", "from transformers import AutoTokenizer", "not transformers"),
        ("quantize/plan.py", "import modelopt.torch", "not modelopt"),
        ("cli/x.py", "import rich.table", "imports rich at module level"),
        ("cli/x.py", "from dflash_trt.serving.llm import LLM", "imports dflash_trt.serving at module level"),
        ("cli/x.py", "class A:\n    import yaml", "imports yaml at module level"),
        ("__init__.py", "from dflash_trt.serving.llm import LLM", "imports dflash_trt.serving at module level"),
        ("utils/x.py", "", "stands in no package of the table"),
        ("loose.py", "", "stands in no package of the table"),
    ],
)
def test_a_forbidden_import_is_caught(tmp_path: Path, path: str, code: str, message: str) -> None:
    found = violations(_package(tmp_path, path, code))
    assert [str(violation).split(":")[0] for violation in found] == [f"{PACKAGE}/{path}"]
    assert message in found[0].message


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (
            "scheduler/x.py",
            "import heapq\nfrom dflash_trt.core.step_plan import StepPlan\nfrom dflash_trt import scheduler",
        ),
        ("backends/torch/ops.py", "import torch.nn.functional"),
        ("backends/tensorrt/ops.py", "import tensorrt"),
        ("engine_dir/tokenizer_dir.py", "from transformers import AutoTokenizer"),
        ("quantize/calibrate.py", "import modelopt.torch"),
        (
            "cli/x.py",
            "import click\nimport dflash_trt\ndef f():\n    from dflash_trt.serving.llm import LLM\n    import rich",
        ),
        ("cli/x.py", "if TYPE_CHECKING:\n    from dflash_trt.serving.llm import LLM"),
    ],
)
def test_an_allowed_import_is_not_caught(tmp_path: Path, path: str, code: str) -> None:
    assert violations(_package(tmp_path, path, code)) == []


def _package(tmp_path: Path, path: str, code: str) -> Path:
    package = tmp_path / PACKAGE
    (package / path).parent.mkdir(parents=True, exist_ok=True)
    (package / path).write_text(code)
    return package
