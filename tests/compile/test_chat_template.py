"""Options of the chat template in an engine: stored at build, for every conversation that does not bring its own."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dflash_trt import LLM, SamplingParams
from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.quantization import CalibrationConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.quantize.calibrate_prompts import calibration_prompts
from tests.cli.conftest import Invoke, invoke  # noqa: F401 - a fixture
from tests.factories import make_target, make_zlab_drafter

# As Qwen3's, whose template opens and closes the thoughts itself where it is told not to think.
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
KNOWN = "Qwen3-8B-DFlash-b16"
HI = [{"role": "user", "content": "Hi"}]
CARD = "```python\ntokenizer.apply_chat_template(messages, tokenize=False, enable_thinking={})\n```\n"
ONE = SamplingParams(max_new_tokens=1, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("checkpoints")
    target = make_target(base / "target")
    (target / "chat_template.jinja").write_text(THINKING)
    for name in (KNOWN, "drafter"):
        make_zlab_drafter(base / name, target_dir=target)
    return base


def build(checkpoints: Path, output: Path, drafter: str | None, **options: Any) -> EngineDir:
    config = BuildConfig(target="target", drafter=drafter, dtype="float32", chat_template_options=options)
    return build_engine(
        config, output, base_dir=checkpoints, overwrite=False, command=("build",), progress=lambda progress: None
    )


@pytest.fixture(scope="module")
def engine(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkpoints, tmp_path_factory.mktemp("engines") / "engine", KNOWN).path


def expected_tokens(checkpoints: Path, **options: Any) -> list[int]:
    """By transformers."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "target")
    return list(tokenizer.apply_chat_template(HI, add_generation_prompt=True, return_dict=False, **options))


def test_a_known_drafter_brings_its_options(engine: Path) -> None:
    opened = EngineDir.open(engine)
    assert opened.manifest.chat_template_options == {"enable_thinking": False}
    (note,) = (note for note in opened.provenance()["notes"] if "enable_thinking" in note)
    assert note.startswith(
        "chat template: enable_thinking=false (for z-lab/Qwen3-8B-DFlash-b16: README and package list"
    )


def test_a_conversation_has_the_options_unless_it_brings_its_own(checkpoints: Path, engine: Path) -> None:
    plain, silent = expected_tokens(checkpoints), expected_tokens(checkpoints, enable_thinking=False)
    assert len(silent) > len(plain)
    with LLM(engine, num_threads=1) as llm:
        own = {"messages": HI, "chat_template_kwargs": {"enable_thinking": True}}
        outputs = llm.generate([{"messages": HI}, own, {"messages": HI, "chat_template_kwargs": {"other": 1}}], ONE)
        assert [output.num_prompt_tokens for output in outputs] == [len(silent), len(plain), len(silent)]
        assert llm.chat_template_options == {"enable_thinking": False}
        assert llm.codec is not None
        assert llm.codec.encode_chat(HI) == silent


@pytest.mark.parametrize(
    ("card", "given", "expected", "reason"),
    [
        (None, {}, {}, None),
        ("False", {}, {"enable_thinking": False}, "from the examples of the drafter's README.md"),
        ("False", {"enable_thinking": True}, {"enable_thinking": True}, "given"),
        (None, {"enable_thinking": False}, {"enable_thinking": False}, "given"),
    ],
)
def test_options_come_from_the_card_and_from_the_configuration(
    checkpoints: Path,
    tmp_path: Path,
    card: str | None,
    given: dict[str, Any],
    expected: dict[str, Any],
    reason: str | None,
) -> None:
    readme = checkpoints / "drafter" / "README.md"
    readme.unlink(missing_ok=True)
    if card is not None:
        readme.write_text(CARD.format(card))
    built = build(checkpoints, tmp_path / "engine", "drafter", **given)
    assert built.manifest.chat_template_options == expected
    notes = [note for note in built.provenance()["notes"] if note.startswith("chat template")]
    assert [note.rpartition("(")[2] for note in notes] == ([] if reason is None else [f"{reason})"])


def test_an_option_that_the_template_does_not_read_is_refused_or_left_out(checkpoints: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="enable_thinkin: expected a variable of the chat template, found none of that"
    ):
        build(checkpoints, tmp_path / "engine", KNOWN, enable_thinkin=False)
    target = make_target(tmp_path / "target")  # without a template
    make_zlab_drafter(tmp_path / KNOWN, target_dir=target)
    assert build(tmp_path, tmp_path / "engine", KNOWN).manifest.chat_template_options == {}
    with pytest.raises(ConfigError, match="The target has no chat template"):
        build(tmp_path, tmp_path / "other", KNOWN, enable_thinking=False)


def test_commands_say_the_options(engine: Path, invoke: Invoke, checkpoints: Path, tmp_path: Path) -> None:  # noqa: F811
    assert "\nchat template: enable_thinking=false\n" in invoke("inspect", engine).stdout
    words = ["run", engine, "--prompt", "Hi", "--max-new-tokens", "1"]
    assert "\nchat template: enable_thinking=false\n" in invoke(*words, "--chat").stderr
    assert "chat template" not in invoke(*words).stderr
    own = invoke(*words, "--chat", "--chat-template-option", "enable_thinking=true")
    assert "\nchat template: enable_thinking=true\n" in own.stderr
    report = json.loads(invoke(*words, "--chat", "--json").stdout)
    assert report["chat_template_options"] == {"enable_thinking": False}
    assert report["summary"]["num_prompt_tokens"] == len(expected_tokens(checkpoints, enable_thinking=False))
    config = tmp_path / "pair.yaml"
    config.write_text(
        f"target: {checkpoints}/target\ndrafter: {checkpoints}/{KNOWN}\n"
        "chat_template_options: {enable_thinking: false}\n"
    )
    flags = ["--chat-template-option", "enable_thinking=true", "--dtype", "float32"]
    built = invoke("build", config, "-o", tmp_path / "engine", *flags)
    assert "note: chat template: enable_thinking=true (given)\n" in built.stdout


def test_engines_with_other_options_are_not_compared_over_conversations(
    engine: Path,
    checkpoints: Path,
    tmp_path: Path,
    invoke: Invoke,  # noqa: F811
) -> None:
    other = build(checkpoints, tmp_path / "other", KNOWN, enable_thinking=True).path
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": HI}) + "\n")
    refused = invoke("eval", engine, "--against", other, "--input-file", rows)
    assert refused.exit_code == 2
    assert "expected enable_thinking=true, found enable_thinking=false" in refused.stderr
    rows.write_text(json.dumps({"prompt": "Hi"}) + "\n")
    assert invoke("eval", engine, "--against", other, "--input-file", rows, "--max-new-tokens", "1").exit_code == 0


def test_calibration_renders_conversations_as_they_will_be_served(checkpoints: Path, tmp_path: Path) -> None:
    rows = [{"messages": HI}, {"messages": HI, "chat_template_kwargs": {"language": "de"}}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = "{{ messages[0].content }} in {{ language | default('no language') }}"
    target = tmp_path / "target"
    shutil.copytree(checkpoints / "target", target)
    (target / "chat_template.jinja").write_text(template)
    found = calibration_prompts(
        CalibrationConfig(prompts="rows.jsonl"),
        base_dir=tmp_path,
        tokenizer_dir=target,
        vocab_size=1 << 20,
        template_options={"language": "en"},
    )
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert [tokenizer.decode(ids) for ids in found] == [f"{HI[0]['content']} in {word}" for word in ("en", "de")]
