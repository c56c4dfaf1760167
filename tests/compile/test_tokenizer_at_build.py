"""A tokenizer that an engine could not serve text with is refused before any work, by the name of its file."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.compile.build import BuildProgress, build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import CheckpointError
from tests.factories import edit_json, make_target, read_json, write_json

TOKENIZER, CONFIG, JINJA = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"

Break = Callable[[Path], object]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = make_target(tmp_path / "target")
    (path / JINJA).write_text(TEMPLATE)
    return path


def build(target: Path) -> list[str]:
    """The stages that the build went through."""
    stages: list[str] = []

    def progress(progress: BuildProgress) -> None:
        if progress.stage not in stages:
            stages.append(progress.stage)

    config = BuildConfig(target=str(target), dtype="float32")
    build_engine(
        config, target.with_name("engine"), base_dir=Path(), overwrite=False, command=("build",), progress=progress
    )
    return stages


def write(name: str, content: str | bytes) -> Break:
    return lambda target: (target / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def cut(name: str) -> Break:
    return lambda target: (target / name).write_bytes((target / name).read_bytes()[:-100])


def edit(name: str, **fields: Any) -> Break:
    return lambda target: edit_json(target / name, **fields)


def edit_model(**fields: Any) -> Break:
    def change(target: Path) -> None:
        write_json(target / TOKENIZER, (full := read_json(target / TOKENIZER)) | {"model": full["model"] | fields})

    return change


def template_in_config(template: Any) -> Break:
    def change(target: Path) -> None:
        (target / JINJA).unlink()
        edit_json(target / CONFIG, chat_template=template)

    return change


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut(TOKENIZER), "tokenizer.json: expected a JSON object"),
        (write(TOKENIZER, ""), "tokenizer.json: expected a JSON object"),
        (write(TOKENIZER, "[]"), "tokenizer.json: expected a JSON object, found a JSON list"),
        (write(TOKENIZER, b"\xff\xfe"), "tokenizer.json: expected a JSON object"),
        (write(TOKENIZER, "{}"), "tokenizer.json: expected a fast tokenizer that transformers can load"),
        (write(TOKENIZER, '{"model": 1, "model": 2}'), "tokenizer.json: expected a JSON object, found key 'model'"),
        (write(TOKENIZER, '{"a":' * 200 + "1" + "}" * 200), "tokenizer.json: expected a fast tokenizer"),
        (write(TOKENIZER, "version https://git-lfs.github.com/spec/v1\n"), "tokenizer.json: expected a JSON object"),
        (edit(TOKENIZER, model=None), "tokenizer.json: expected a fast tokenizer"),
        (edit(TOKENIZER, pre_tokenizer={"type": "Nonsense"}), "tokenizer.json: expected a fast tokenizer"),
        (edit(TOKENIZER, decoder={"type": "Nonsense"}), "tokenizer.json: expected a fast tokenizer"),
        (edit(TOKENIZER, decoder=None), "tokenizer.json: expected "),
        (edit_model(type="Nonsense"), "tokenizer.json: expected a fast tokenizer"),
        (edit_model(vocab={}), "tokenizer.json: expected "),
        (edit_model(vocab={"H": 4, "x": 5}), "tokenizer.json: expected "),
        (edit_model(merges=[["no", "such"]]), "tokenizer.json: expected a fast tokenizer"),
        (lambda target: (target / TOKENIZER).rename(target / "vocab.json"), "tokenizer.json: expected a fast "),
        (cut(CONFIG), "tokenizer_config.json: expected a JSON object"),
        (write(CONFIG, "[]"), "tokenizer_config.json: expected a JSON object"),
        (edit(CONFIG, added_tokens_decoder=3), "tokenizer_config.json: expected a fast tokenizer"),
        (edit(CONFIG, eos_token={"content": 3}), "tokenizer_config.json: expected a fast tokenizer"),
        (write("special_tokens_map.json", "{"), "special_tokens_map.json: expected a JSON object"),
        (write(JINJA, "{% for message in messages %}"), "chat_template.jinja: expected a chat template that renders"),
        (write(JINJA, "{{ messages | nonsense }}"), "chat_template.jinja: expected a chat template that renders"),
        (write(JINJA, "{{ 1 / 0 }}"), "chat_template.jinja: expected a chat template that renders"),
        (write(JINJA, "{{ raise_exception('no') }}"), "chat_template.jinja: expected a chat template that renders"),
        (write(JINJA, "{% for m in mesages %}{{ m }}{% endfor %}x"), "what a message says, found 'x'"),
        (write(JINJA, b"\xff"), "chat_template.jinja: expected UTF-8 text"),
        (template_in_config("{% if %}"), "tokenizer_config.json: expected a chat template that renders a message"),
        (template_in_config(3), "tokenizer_config.json: expected"),
    ],
)  # fmt: skip
def test_a_broken_tokenizer_is_refused_before_any_work(target: Path, damage: Break, said: str) -> None:
    damage(target)
    with pytest.raises(CheckpointError) as caught:
        build(target)
    assert f"tokenizer of target {target}: {said}" in str(caught.value) or said.startswith("what")
    assert said in str(caught.value)
    assert not target.with_name("engine").exists()


def test_a_vocabulary_larger_than_the_targets_is_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", vocab_size=100, eos_token_id=0)
    with pytest.raises(
        CheckpointError, match=r"expected token ids below the target's vocab_size 100, found .* with id 259"
    ):
        build(target)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("".join(f"{{% for i{n} in range(3000) %}}" for n in range(3)) + "{% endfor %}" * 3, "one that takes longer"),
        ("{% set x = namespace(v='a' * 1000) %}{% for i in range(40) %}{% set x.v = x.v ~ x.v %}{% endfor %}", "more"),
    ],
    ids=["time", "memory"],
)
def test_a_template_is_rendered_within_limits(target: Path, template: str, found: str) -> None:
    (target / JINJA).write_text(template + TEMPLATE)
    started_s = time.monotonic()
    with pytest.raises(CheckpointError, match=rf"chat_template\.jinja: expected a chat template .*{found}"):
        build(target)
    assert time.monotonic() - started_s < 60


@pytest.mark.parametrize(
    "template",
    [TEMPLATE, "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}" + TEMPLATE],
)
def test_a_sound_tokenizer_is_proven_while_checking(target: Path, template: str) -> None:
    (target / JINJA).write_text(template)
    assert build(target) == ["checking", "hashing inputs", "writing weights", "verifying"]


def test_other_files_of_the_checkpoint_do_not_decide(target: Path) -> None:
    """The engine's tokenizer/ has no config.json, from which transformers would choose a class."""
    (target / TOKENIZER).unlink()
    write_json(target / "vocab.json", {"a": 0})
    (target / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json: expected .*, found FileNotFoundError: no tokenizer\.json"
    ):
        build(target)
    assert json.loads((target / "config.json").read_text())["model_type"] == "qwen3"
