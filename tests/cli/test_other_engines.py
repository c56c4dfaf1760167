"""Every name of another engine gets an answer in every command, and each name in an answer exists where it says."""

import inspect
import re
from collections.abc import Callable, Collection, Iterator

import click
import pytest
from click.testing import CliRunner

from dflash_trt import LLM, SamplingParams
from dflash_trt.cli.main import cli
from dflash_trt.core.config import BuildConfig, build_config_from
from dflash_trt.core.errors import ConfigError, RequestError
from dflash_trt.core.other_engines import COMMANDS, NAMES, VALUES
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.sampling import SAMPLING_FIELDS
from tests.cli.test_help import COMMANDS as OUR_COMMANDS

LEAVES = {name: command for name, command in OUR_COMMANDS.items() if not isinstance(command, click.Group)}
GROUPS = {name: command for name, command in OUR_COMMANDS.items() if isinstance(command, click.Group)}
SAMPLING = {row.name for row in SAMPLING_FIELDS}
TYPED = re.compile(r"`(dflash-trt[a-z -]*?)(?: (--[a-z-]+))?`")


def flags(command: click.Command) -> set[str]:
    return {opt for param in command.params for opt in (*param.opts, *param.secondary_opts)}


def arguments(command: click.Command) -> set[str]:
    return {str(param.metavar) for param in command.params if isinstance(param, click.Argument)}


def refusal(*words: str) -> str:
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2
    return result.stderr.partition("Error: ")[2].strip()


def check_names(answer: str, here: click.Command) -> None:
    """Each command exists, each option in the command that is named with it or at hand, each argument at hand."""
    for path, flag in TYPED.findall(answer):
        assert path in OUR_COMMANDS, answer
        assert not flag or flag in flags(OUR_COMMANDS[path]), answer
    rest = TYPED.sub("", answer)
    assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) <= flags(here), answer
    assert set(re.findall(r"Use the argument (.+?)\.(?: |$)", rest)) <= {
        metavar.rstrip(".") for metavar in arguments(here)
    } | arguments(here), answer


def test_the_table_is_about_names_that_are_not_ours() -> None:
    ours = {opt.lstrip("-").replace("-", "_") for command in OUR_COMMANDS.values() for opt in flags(command)}
    assert not NAMES.keys() & ours
    assert not COMMANDS.keys() & {part for name in OUR_COMMANDS for part in name.split()}
    assert len(NAMES) > 100
    for answer in NAMES.values():
        assert answer.ours or answer.sentence


@pytest.mark.parametrize("name", LEAVES)
def test_every_name_gets_an_answer_in_every_command(name: str) -> None:
    for index, foreign in enumerate(NAMES):
        typed = f"--{foreign}=1" if index % 2 else f"--{foreign.replace('_', '-')}"
        flag, _, answer = refusal(*name.split()[1:], typed).removeprefix("No such option '").partition("'. ")
        assert flag == typed.partition("=")[0]
        assert answer
        check_names(answer, LEAVES[name])
        named = re.findall(r"--[a-z-]+|Use the argument", answer)
        assert named or not NAMES[foreign].ours, "an answer that names what is ours"
        assert answer.endswith(NAMES[foreign].sentence), "and what else is to be said"


@pytest.mark.parametrize("typed", ["-tp", "-pp", "-dp", "-ep"])
def test_names_with_one_dash_are_names(typed: str) -> None:
    for name in LEAVES:
        answer = refusal(*name.split()[1:], typed, "2")
        assert answer.startswith(f"No such option '{typed}'. ")
        check_names(answer.partition(". ")[2], LEAVES[name])


def examples() -> Iterator[tuple[str, str]]:
    yield "build --model x", "Use --target."
    yield "run e --model x", "Use the argument ENGINE_DIR."
    yield "plan --model x", "Use --target."
    yield "doctor --model x", "`dflash-trt build --target` sets it."
    yield "serve e --tensor-parallel-size 2", "`dflash-trt build --tp-size` sets it."
    yield "build -tp 2", "Use --tp-size."
    yield "serve e --max-num-seqs 2", "`dflash-trt build --max-batch-size` sets it."
    yield "serve e --max-model-len 2", "`dflash-trt build --max-seq-len` sets it."
    yield "build --max-num-batched-tokens 2", "Use --max-num-tokens."
    yield "serve e --gpu-memory-utilization .9", "Use --kv-cache-free-memory-fraction."
    yield "serve e --speculative-config {}", "`dflash-trt build --drafter` sets it."
    yield "build --speculative-draft-model-path x", "Use --drafter."
    yield "run e --num-speculative-tokens 3", "Use --draft-length."
    yield "build --num-speculative-tokens 3", "Use --max-draft-len."
    yield "serve e --enable-prefix-caching", "Prefix caching is on by default"
    yield "serve e --disable-radix-cache", "Use --no-prefix-caching."
    yield "serve e --enable-auto-tool-choice", "Use --tool-call-parser."
    yield "serve e --served-model-name x", "Use --model-name."
    yield "serve e --api-key x", "`dflash-trt serve` has no users"
    yield "run e --temp 1", "Use --temperature."
    yield "run e --max-tokens 1", "Use --max-new-tokens."
    yield "run e --stop-token-ids 1", "Use --stop-token-id."
    yield "build --kv-cache-dtype fp8", "Use --kv-cache."
    yield "build --output_dir x", "Use --output."
    yield "run e --output-dir x", "Use --output-file."
    yield "build --max_batch_size 2", "Use --max-batch-size."
    yield "serve e --max_batch_size 2", "`dflash-trt build --max-batch-size` sets it."
    yield "run e --max-seq-len 2", "`dflash-trt build --max-seq-len` sets it."


@pytest.mark.parametrize(("typed", "answer"), list(examples()))
def test_an_answer_leads_to_the_right_name(typed: str, answer: str) -> None:
    assert f"'. {answer}" in refusal(*typed.split())


def test_a_misspelt_option_is_still_a_misspelt_one() -> None:
    assert "Did you mean '--temperature'?" in refusal("run", "e", "--temprature", "1")


@pytest.mark.parametrize("foreign", COMMANDS)
def test_every_command_of_others_gets_an_answer_in_every_group(foreign: str) -> None:
    for name in GROUPS:
        answer = refusal(*name.split()[1:], foreign)
        assert answer.startswith(f"No such command '{foreign}'. Use `dflash-trt ")
        check_names(answer, GROUPS[name])


@pytest.mark.parametrize("theirs", VALUES)
def test_a_value_of_others_leads_to_one_of_ours(theirs: str, tmp_path) -> None:
    """In each option that has ours; click lists the values of the others."""
    places = 0
    for name, command in LEAVES.items():
        for param in command.params:
            if VALUES[theirs] in getattr(param.type, "choices", ()) and param.name != "discovery_backend":
                places += 1
                assert f"Did you mean '{VALUES[theirs]}'?" in refusal(*name.split()[1:], param.opts[0], theirs)
    if VALUES[theirs] in ("fp8", "int4"):
        result = CliRunner().invoke(cli, ["build", "demo", "-o", str(tmp_path / "e"), "--quantization", theirs])
        places += f"Did you mean '{VALUES[theirs]}'?" in result.stderr
    assert places


def test_another_number_of_bits_is_not_what_was_meant(tmp_path) -> None:
    result = CliRunner().invoke(cli, ["build", "demo", "-o", str(tmp_path / "e"), "--quantization", "int3"])
    assert "found int3. Choose one of them." in result.stderr


@pytest.mark.parametrize("foreign", sorted(NAMES.keys() - RuntimeConfig.model_fields))
def test_every_name_gets_an_answer_in_a_file_and_in_python(foreign: str) -> None:
    places: list[tuple[Callable[..., object], Collection[str]]] = [
        (lambda **fields: build_config_from({"target": "x", **fields}, source="pair.yaml"), BuildConfig.model_fields),
        (lambda **fields: LLM("engine", **fields), {"engine_dir", *RuntimeConfig.model_fields}),
        (SamplingParams, SAMPLING),
    ]
    if "engine_dir" in NAMES[foreign].ours:
        places[1] = (LLM, {"engine_dir"})
    for call, known in places:
        with pytest.raises((ConfigError, RequestError)) as error:
            call(**{foreign: 1})
        answer = str(error.value)
        check_names(answer, LEAVES["dflash-trt build"])
        used = re.findall(r"Use (\w+)[.=]", answer)
        assert set(used) <= set(known)
        assert set(re.findall(r"LLM has (\w+)", answer)) <= RuntimeConfig.model_fields.keys()
        assert set(re.findall(r"SamplingParams has (\w+)", answer)) <= SAMPLING
        assert "Known names" not in answer and "Did you mean" not in answer
        assert used or not set(NAMES[foreign].ours) & set(known), "ours, where the place has it"


def test_what_users_of_other_engines_write_in_python() -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(max_tokens=5, temprature=1)
    assert "'max_tokens' is no sampling parameter. Use max_new_tokens." in str(error.value)
    assert "'temprature' is no sampling parameter. Did you mean 'temperature'?" in str(error.value)
    with pytest.raises(ConfigError, match=r"LLM: expected an engine_dir, found model\. Use engine_dir\."):
        LLM(model="x")
    with pytest.raises(ConfigError, match="`dflash-trt build --tp-size` sets it"):
        LLM("engine", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="Use kv_cache_free_memory_fraction"):
        LLM("engine", gpu_memory_utilization=0.9)
    with pytest.raises(ConfigError, match="SamplingParams has temperature"):
        LLM("engine", temperature=0.9)
    with pytest.raises(ConfigError, match="Use enable_prefix_caching=False"):
        LLM("engine", disable_radix_cache=True)
    assert next(iter(inspect.signature(LLM).parameters)) == "engine_dir"
    assert inspect.signature(SamplingParams).parameters["max_new_tokens"].default == 128
