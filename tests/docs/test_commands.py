"""Commands of the documentation: those that can run here do, and every subcommand and option exists.

`dflash-trt` runs in this process, from a scratch directory that looks like a checkout after scripts/quickstart.
"""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import click
import pytest
import yaml

from dflash_trt.cli.main import cli
from dflash_trt.core.config import build_config_from
from dflash_trt.core.other_engines import NAMES
from plugins.aot.variants import LibrarySpec
from tests.cli.conftest import Invoke, invoke  # noqa: F401 - a fixture
from tests.docs.pages import PAGES, ROOT, Command, Page

# How a command begins, and why no test runs it as it stands.
NOT_RUN = {
    "git clone": "needs the repository's address",
    "cd ": "goes with git clone",
    "scripts/install": "installs; CI runs it",
    "scripts/check": "installs; CI runs it",
    "scripts/software_gpu": "installs PyTorch's CUDA build; tests/software_gpu/test_serving_run.py runs it",
    "scripts/test": "installs; CI runs it",
    "scripts/lock": "installs",
    "scripts/simulation_check.py": "minutes; tests/simulation runs loads of both kinds",
    "python -m scripts.cold_start": "minutes; tests/simulation/test_scripts.py runs a short one",
    "scripts/press_point.py": "minutes; tests/cli/test_plan_sweep.py sweeps",
    "dflash-trt plan demo --machine": "needs a machine file; tests/cli/test_plan_sweep.py plans with one",
    ".venv/bin/pip": "installs",
    "scripts/gpu_check": "needs a GPU and TensorRT",
    "scripts/install_triton_server": "installs a server (144 MB)",
    "scripts/serve_triton_demo": "installs a server; tests/triton_server talks to one",
    "dflash-trt deploy triton": "needs the environment of a server; tests/triton_server deploys",
    "dflash-trt serve": "runs until it is stopped; tests/servers/dynamo starts it",
    "dflash-trt deploy slurm": "needs an engine of several ranks; tests/cli/test_ranks.py runs the line",
    "dflash-trt ranks": "needs a node 0; tests/executor/test_nodes.py runs both",
    "export DFLASH_TRT_SECRET": "tests/executor/node_commands.py sets one",
    "dflash-trt worker": "needs a front end and etcd; tests/servers/dynamo runs workers",
    "etcd": "is a Debian package; tests/servers/dynamo/test_nodes.py runs it",
    "pip install": "installs",
    "aiperf": "is not a dependency; was run by hand",
    "python -m scripts.load_openai": "minutes; tests/servers/dynamo/test_load.py runs a short one",
    "tritonserver": "needs a server; tests/triton_server starts what `deploy triton` prints",
    ".triton_server/": "needs a server; tests/triton_server starts what `deploy triton` prints",
    "curl": "needs a server; tests/triton_server sends such requests",
    "apt install": "installs",
    "docker": "needs a container runtime, and a GPU; tests/docs/test_site.py lints Containerfile",
    "python3 -m venv": "for the container of a GPU node",
    "/data/venv": "for the container of a GPU node",
    "--http-restricted-api": "options, which tests/triton_server/test_lifecycle.py passes",
    "--grpc-restricted-protocol": "options, which tests/triton_server/test_lifecycle.py passes",
    "dflash-trt bench": "minutes; tests/bench runs each benchmark",
    "dflash-trt build demo --tp-size 2": "tests/cli/test_ranks.py builds and runs two ranks",
    "dflash-trt run build/demo_tp2": "tests/cli/test_ranks.py builds and runs two ranks",
    "python -m scripts.published_points": "minutes; tests/docs/test_published_speeds.py plans every tenth series",
    "python scripts/bench_threads.py": "minutes beside other tests: its threads wait for a core",
    "python -m scripts.text_stability": "minutes",
    "python -m scripts.ngram_drafts": "minutes",
    "python -m scripts.host_tier": "minutes; tests/simulation/test_scripts.py runs a short one",
    "python -m scripts.prefill_apart": "minutes; tests/servers/dynamo/test_roles.py runs a short one",
    "python -m scripts.deterministic_cost": "minutes",
    "scripts/quantization_table.py": "minutes",
    "scripts/quantization_memory.py": "minutes, and 6 GB of disk",
    "scripts/train_demo/train": "hours",
    "scripts/soak": "a minute; tests/bench/test_soak.py runs a short one",
    "scripts/gpu_visit": "minutes; tests/kernels/test_gpu_visit.py runs parts of a dry run",
    "scripts/bench_peers": "minutes; tests/bench/test_peers.py plays the sides",
    "python -m scripts.bench_shape": "minutes, and 5 GB of disk; tests/bench/test_peers.py plays a peer",
    "scripts/build_plugin": "minutes; tests/plugins builds a small library",
    "python -m scripts.release_plugins": "minutes; tests/plugins/test_release_plugins.py plays the compiler",
    "dflash-trt build-plugin": "minutes; tests/plugins builds a small library from a wheel's sources",
    "dflash-trt build build.yaml": "needs the Hugging Face hub; tests/trt/test_check.py checks pairs",
    "dflash-trt run qwen3-8b-trt": "needs TensorRT",
    "TENSORRT_INCLUDE_DIR=": "minutes; tests/plugins builds a small library",
    "python -m scripts.mask_cost": "half a minute; tests/serving/test_structured_output.py makes such masks",
    "python -m scripts.bench_launches": "a minute; tests/plugins times a small library",
    "python -m scripts.build_memory": "a minute, and 4.5 GB of disk; tests/trt builds tiny engines",
    "pytest tests/kernels/test_step_counts.py": "a test itself",
    "scripts/sampled_acceptance.py": "minutes",
    "python -m scripts.kernel_report": "a minute; tests/kernels/test_kernel_report.py reads its numbers",
    "scripts/full_size_check": "half an hour, and 30 GB of disk; tests build tiny pairs in the same layout",
    "dflash-trt build --target Qwen3-8B --drafter Qwen3-8B-DFlash-b16 --check": "tests/trt/test_check.py checks pairs",
    "dflash-trt build --target Qwen/": "needs the Hugging Face hub; tests/compile/test_hub_names.py has a stand-in",
    "dflash-trt build qwen3-8b-fp8": "needs the Hugging Face hub; tests/cli/test_recipes.py builds a recipe",
    "dflash-trt plan kimi-k2.6-int4-h200": "needs the Hugging Face hub; tests/plan/test_attention_dp_plan.py plans it",
    "dflash-trt build kimi-k2.6-int4-b300": "needs the Hugging Face hub; tests/cli/test_recipes.py builds a recipe",
    "dflash-trt build gpt-oss-120b-mxfp4": "needs the Hugging Face hub; tests/cli/test_recipes.py builds a recipe",
    "dflash-trt build --target Qwen3-8B --drafter Qwen3-8B-DFlash-b16 -o qwen3-8b-trt": "needs TensorRT",
    "lm_eval": "needs lm-eval; scripts/harness_check runs it, tests/servers/dynamo/test_openai.py asks as it does",
    "guidellm": "needs guidellm",
    "kubectl": "needs a cluster; tests/docs/test_scaling.py reads what is applied",
    "dflash-trt run engine --chat": "needs a chat template of Qwen3; tests/compile/test_chat_template.py runs it",
    "dflash-trt build --target gpt-oss-120b": "a minute; tests/trt/test_check.py checks pairs and plans them",
    "dflash-trt build --check --target gpt-oss-120b": "a minute; tests/trt/test_check.py checks such a target",
    "export ": "sets a variable for the benchmark after it",
}
# Appended, so that a test is quick; click and argparse take the last value of an option.
QUICKER = {
    "dflash-trt eval": ("--max-new-tokens", "4"),
    "python -m scripts.bench_steps": ("1",),
    "python -m scripts.block_rates": ("--mebibytes", "1", "--rounds", "1"),
    "python -m scripts.bench_products": ("--rounds", "1"),
    "python -m scripts.hand_over_wait": ("--rounds", "1"),
}

_PREFIX = re.compile(
    r"(?:[A-Z_]+=\S+ +|taskset -c \S+ +|\.venv/bin/(?=dflash-trt|python)|/data/venv/bin/(?=dflash-trt))*"
)
_DFLASH = re.compile(r"\bdflash-trt(?= [a-z-])")


def plain(command: str) -> str:
    """Without variables, the pinning to a core and the virtual environment's path."""
    return command[_PREFIX.match(command).end() :]  # type: ignore[union-attr] - it matches nothing, too


def reason_not_to_run(command: Command) -> str | None:
    if command.text.startswith("/data/venv"):
        return NOT_RUN["/data/venv"]
    text = plain(command.text)
    found = [start for start in NOT_RUN if text.startswith(start) or command.text.startswith(start)]
    return NOT_RUN[max(found, key=len)] if found else None


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that looks like a checkout; the pair stands in for Qwen3-8B and its drafter."""
    directory = tmp_path_factory.mktemp("checkout")
    for name in ("dflash_trt", "scripts", "plugins"):
        (directory / name).symlink_to(ROOT / name)
    demo = ROOT / "dflash_trt" / "demo"
    (directory / "Qwen3-8B").symlink_to(demo / "target")
    (directory / "Qwen3-8B-DFlash-b16").symlink_to(demo / "drafter")
    for name in ("gpt-oss-120b", "gpt-oss-120b-DFlash"):
        (directory / name).mkdir()
        shutil.copy(ROOT / "scripts" / "full_size" / f"{name}.json", directory / name / "config.json")
    return directory


@pytest.fixture
def demo_engine(checkout: Path, invoke: Invoke) -> Path:  # noqa: F811
    """Where scripts/quickstart builds it; also under the names of the two engines that eval compares."""
    engine = checkout / "build" / "demo"
    if not engine.exists():
        built = invoke("build", "demo", "-o", engine)
        assert built.exit_code == 0, built.stderr
        for name in ("engine-fp8", "engine-bf16"):
            (checkout / name).symlink_to(engine)
    return engine


@pytest.mark.parametrize("page", [page for page in PAGES if page.commands], ids=lambda page: page.name)
def test_commands_run(
    page: Page,
    checkout: Path,
    demo_engine: Path,
    invoke: Invoke,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(checkout)
    for command in page.commands:
        if reason_not_to_run(command) is None:
            printed = run(command, invoke, checkout)
            assert has_lines(printed, command.output), f"{command.text}\nprinted\n{printed}"


def run(command: Command, invoke: Invoke, checkout: Path) -> str:  # noqa: F811
    text = plain(command.text)
    extra = next((more for start, more in QUICKER.items() if text.startswith(start)), ())
    if not text.startswith("dflash-trt "):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        words = {"PATH": path, "PYTHONPATH": str(ROOT)}
        ran = subprocess.run(
            ["bash", "-ec", " ".join((text, *extra))],
            cwd=checkout,
            env=os.environ | words,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, f"{command.text}\n{ran.stderr}"
        return ran.stdout + ran.stderr
    result = invoke(*shlex.split(text, comments=True)[1:], *extra)
    assert result.exit_code == 0, f"{command.text}\n{result.stderr}"
    return result.stdout + result.stderr


def has_lines(printed: str, expected: str) -> bool:
    """Whether the lines of `expected` come in this order; numbers may differ, and "..." stands for other lines."""
    lines = iter(printed.splitlines())
    return all(
        any(re.fullmatch(_any_numbers(line), candidate.strip()) for candidate in lines)
        for line in expected.splitlines()
        if line.strip() not in ("", "...")
    )


def _any_numbers(line: str) -> str:
    return r"\d+(\.\d+)?".join(re.escape(part) for part in re.split(r"\d+(?:\.\d+)?", line.strip()))


def test_output_that_the_page_does_not_show_is_noticed() -> None:
    assert has_lines("one\n2.5 s\nthree\n", "one\n...\n31 s")
    assert not has_lines("one\n2.5 s\n", "one\nthree")
    assert not has_lines("2.5 s\none\n", "one\n2.5 s")


def test_no_reason_is_left_over() -> None:
    commands = [command.text for page in PAGES for command in page.commands]
    used = {start for start in NOT_RUN for text in commands if text.startswith(start) or plain(text).startswith(start)}
    assert set(NOT_RUN) - used == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_subcommands_and_options_of_dflash_trt_exist(page: Page) -> None:
    texts = [*(command.text for command in page.commands), *(span for span in page.code_spans if _DFLASH.match(span))]
    texts += [line for language, block in page.blocks if language == "text" for line in block.splitlines()]
    assert [
        problem for text in texts if (found := _DFLASH.search(text)) for problem in wrong(text[found.end() :])
    ] == []


def wrong(arguments: str) -> Iterator[str]:
    """Unknown subcommands and options of `dflash-trt` with these arguments; "a | b" names several subcommands."""
    words = re.split(r"\s+", re.sub(r"'[^']*'", "VALUE", arguments.partition("#")[0].strip()), flags=re.DOTALL)
    command: click.Command = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        names = [words.pop(0)]
        while words[:1] == ["|"]:
            names.append(words[1])
            words = words[2:]
        unknown = [name for name in names if name not in command.commands]
        if unknown:
            yield f"dflash-trt {arguments.strip()}: no command {', '.join(unknown)}"
            return
        command = command.commands[names[0]]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        option = word.partition("=")[0]
        if re.match(r"--?[a-z]", option) and option not in known | {"--help"}:
            yield f"dflash-trt {arguments.strip()}: no option {option}"


def test_an_unknown_subcommand_and_an_unknown_option_are_noticed() -> None:
    assert list(wrong(" bench speedup | throughput | serve")) == []
    assert list(wrong(" run build/demo --prompt 'a --b' --no-drafter")) == []
    assert len(list(wrong(" bench speedup | hurry"))) == 1
    assert len(list(wrong(" run DIR --promt x --K 3 --quick=1"))) == 2


@cache
def options_of_ours() -> set[str]:
    """Of the command line, and every word of scripts/ and plugins/aot that looks like one."""
    commands: list[click.Command] = [cli]
    options = {f"--{item.name.replace('_', '-')}" for item in fields(LibrarySpec)}
    while commands:
        command = commands.pop()
        commands += command.commands.values() if isinstance(command, click.Group) else ()
        options |= {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    folders = ("scripts", "software_gpu", "plugins/aot")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    for source in sources:
        if source.is_file() and source.suffix in ("", ".py"):
            options |= set(re.findall(r"--[a-z][\w-]+", source.read_text()))
    return options


# Of tritonserver, curl and TensorRT-LLM, in prose.
FOREIGN_OPTIONS = {
    "--engine_dir",
    "--gemm_plugin",
    "--gpt_attention_plugin",
    "--input_text",
    "--kv_cache_dtype",
    "--max_batch_size",
    "--max_draft_len",
    "--max_num_tokens",
    "--max_seq_len",
    "--model_dir",
    "--qformat",
    "--speculative_decoding_mode",
    "--tp_size",
    "--use_paged_context_fmha",
    "--workers",
    "--accept-parameter",
    "--allow-metrics",
    "--exit-timeout-secs",
    "--grpc-root-cert",
    "--grpc-server-cert",
    "--grpc-server-key",
    "--grpc-use-ssl",
    "--grpc-use-ssl-mutual",
    "--model-control-mode",
    "--speed-limit",
    "--speed-time",
}


def test_options_in_prose_exist() -> None:
    """The page for users of other engines names theirs, which the product answers: see test_tables.py."""
    by_page = {
        page.name: {option for span in page.code_spans for option in re.findall(r"(?<!\S)--[a-z][\w-]+", span)}
        for page in PAGES
    }
    by_page["docs/from_vllm.md"] -= {f"--{name.replace('_', '-')}" for name in NAMES}
    named = set().union(*by_page.values())
    assert named - options_of_ours() - FOREIGN_OPTIONS == set()
    assert FOREIGN_OPTIONS - named - {"--accept-parameter"} == set(), "no page names these"


PROGRAMS = [(page.name, text) for page in PAGES for language, text in page.blocks if language == "python"]


@pytest.mark.parametrize(("name", "code"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_the_python_of_a_page_runs(
    name: str,
    code: str,
    checkout: Path,
    demo_engine: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "example.py").write_text(code)
    monkeypatch.chdir(checkout)
    runpy.run_path(str(tmp_path / "example.py"))
    assert re.search(r"[ \[][1-8]\.\d+", capsys.readouterr().out), "an acceptance length behind a text"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_is_valid(page: Page) -> None:
    for language, text in page.blocks:
        if language == "yaml":
            fields = yaml.safe_load(text)
            if "target" in fields:
                build_config_from(fields, source=page.name)
