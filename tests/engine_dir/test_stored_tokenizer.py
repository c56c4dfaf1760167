"""Templates of a stored tokenizer, and what a build proves of a tokenizer before it stores it."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.engine_dir import tokenizer_dir
from dflash_trt.engine_dir.stored_tokenizer import StoredTokenizer, stored_chat_templates
from dflash_trt.engine_dir.tokenizer_dir import load_tokenizer
from tests.factories import NUM_TEXT_TOKENS, SPECIAL_TOKENS, edit_json, make_target, read_json, write_json
from tests.serving.tokenizers import write_byte_level

NUM_TOKENS = len(SPECIAL_TOKENS) + NUM_TEXT_TOKENS


@pytest.mark.parametrize(
    ("config", "file", "templates"),
    [
        ({}, None, {}),
        ({"chat_template": ""}, None, {}),
        ({"chat_template": "of the config"}, None, {"default": "of the config"}),
        ({"chat_template": "of the config"}, "of the file", {"default": "of the file"}),
        ({"chat_template": [{"name": "a", "template": "b"}]}, None, {"a": "b"}),
        ({"chat_template": {"a": "b", "default": "c"}}, None, {"a": "b", "default": "c"}),
    ],
)
def test_templates_are_those_of_the_file_or_of_the_config(tmp_path: Path, config, file, templates) -> None:
    path = write_byte_level(tmp_path)
    edit_json(path / "tokenizer_config.json", **({"chat_template": None} | config))
    files = {"tokenizer_config.json": (path / "tokenizer_config.json").read_bytes()}
    if file is not None:
        (path / "chat_template.jinja").write_text(file)
        files["chat_template.jinja"] = file.encode()
    assert StoredTokenizer.open(path).chat_templates == stored_chat_templates(files) == templates


@pytest.mark.parametrize(("splits", "is_one_token"), [(None, True), (False, True), (True, False)])
def test_a_special_token_in_a_text_is_one_token_unless_it_is_split(tmp_path: Path, splits, is_one_token) -> None:
    path = write_byte_level(tmp_path)
    if splits is not None:
        edit_json(path / "tokenizer_config.json", split_special_tokens=splits)
    ids = StoredTokenizer.open(path).backend.encode("<|im_end|>").ids
    assert (ids == [2]) == is_one_token and ids == load_tokenizer(path).encode("<|im_end|>")


def test_a_tokenizer_that_was_saved_with_a_length_reads_every_text_whole(tmp_path: Path) -> None:
    path, texts = write_byte_level(tmp_path), ("a", "more than three tokens")
    saved = StoredTokenizer.open(path).backend
    whole = [saved.encode(text).ids for text in texts]
    saved.enable_truncation(3)
    saved.enable_padding(length=9)
    saved.save(str(path / "tokenizer.json"))
    assert [StoredTokenizer.open(path).backend.encode(text).ids for text in texts] == whole


@pytest.mark.parametrize("template", [3, {"default": 3}])
def test_a_template_that_is_no_text_is_refused(template: Any) -> None:
    with pytest.raises(ValueError, match="chat_template: expected text, or texts by name"):
        stored_chat_templates({"tokenizer_config.json": json.dumps({"chat_template": template}).encode()})


def test_tools_have_a_template_of_their_own_where_there_is_one() -> None:
    def chosen(*names: str, has_tools: bool) -> str:
        templates = {name: f"{name}'s" for name in names}
        tokenizer = StoredTokenizer(backend=None, special_tokens={}, chat_templates=templates)
        return tokenizer.chat_template(has_tools=has_tools)

    assert chosen("default", "tool_use", has_tools=True) == "tool_use's"
    assert chosen("default", "tool_use", has_tools=False) == chosen("default", has_tools=True) == "default's"
    for has_tools, names in ((False, ("tool_use", "rag")), (True, ("rag",)), (False, ())):
        with pytest.raises(ValueError, match=f"no template 'default' among {', '.join(sorted(names)) or 'none'}"):
            chosen(*names, has_tools=has_tools)


def resolve(path: Path, *, vocab_size: int = NUM_TOKENS) -> tuple[dict[str, bytes], list[str]]:
    problems: list[str] = []
    files = [path / name for name in ("tokenizer.json", "tokenizer_config.json")]
    return tokenizer_dir.resolve_tokenizer(files, vocab_size=vocab_size, problems=problems), problems


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target")


def test_the_last_token_is_below_the_vocabulary_of_the_target(target: Path) -> None:
    files, problems = resolve(target)
    assert not problems and {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"} == files.keys()
    files, (problem,) = resolve(target, vocab_size=NUM_TOKENS - 1)
    assert not files and f"vocab_size {NUM_TOKENS - 1}, found " in problem and f"with id {NUM_TOKENS - 1}" in problem


def test_an_added_token_of_a_template_is_below_the_vocabulary_of_the_target(target: Path) -> None:
    added = {str(NUM_TOKENS + 9): {"content": "<late>", "special": True}}
    template = "<late>{{ messages[0].content }}"
    edit_json(target / "tokenizer_config.json", added_tokens_decoder=added, chat_template=template)
    files, problems = resolve(target, vocab_size=NUM_TOKENS + 10)
    late = json.loads(files["tokenizer.json"])["added_tokens"][-1]
    assert not problems and late["content"] == "<late>"
    assert resolve(target, vocab_size=late["id"] + 1)[1] == []
    (problem,) = resolve(target, vocab_size=late["id"])[1]
    assert f"token ids below the target's vocab_size {late['id']}, found {late['id']}" in problem


def test_a_stored_tokenizer_that_gives_other_tokens_is_noticed(target: Path, monkeypatch) -> None:
    store = tokenizer_dir._store

    def store_another(tokenizer: Any, source: Path, stored: Path) -> None:
        store(tokenizer, source, stored)
        fields = read_json(stored / "tokenizer.json")
        vocab = fields["model"]["vocab"]
        vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
        write_json(stored / "tokenizer.json", fields)

    monkeypatch.setattr(tokenizer_dir, "_store", store_another)
    files, (problem,) = resolve(target)
    assert not files and 'expected the tokens of transformers for "  two  spaces' in problem


def test_a_stored_tokenizer_that_gives_other_texts_is_noticed(target: Path, monkeypatch) -> None:
    store = tokenizer_dir._store

    def store_another(tokenizer: Any, source: Path, stored: Path) -> None:
        store(tokenizer, source, stored)
        fields = read_json(stored / "tokenizer.json")
        changed = {"type": "Replace", "pattern": {"String": "5"}, "content": "6"}
        fields["decoder"] = {"type": "Sequence", "decoders": [fields["decoder"], changed]}
        write_json(stored / "tokenizer.json", fields)

    monkeypatch.setattr(tokenizer_dir, "_store", store_another)
    files, (problem,) = resolve(target)
    assert not files and 'expected the text of transformers for those tokens, "  two  spaces' in problem


def test_a_tokenizer_that_takes_for_ever_is_given_up(target: Path, monkeypatch) -> None:
    monkeypatch.setattr(tokenizer_dir, "_MAX_STAGE_S", 0.1)
    monkeypatch.setattr(tokenizer_dir, "_load_alone", lambda path: time.sleep(30))
    started_s = time.monotonic()
    files, (problem,) = resolve(target)
    assert not files and "tokenizer.json" in problem and "found TimeoutError: nothing within 0 s" in problem
    assert time.monotonic() - started_s < 15
