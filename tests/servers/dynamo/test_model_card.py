"""The model card of an engine, and the events of its prefix cache, without a front end."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.core.errors import ConfigError
from dflash_trt.engine_dir import EngineDir
from dflash_trt.engine_dir.stored_tokenizer import StoredTokenizer
from dflash_trt.engine_dir.template_renderer import TemplateRenderer
from dflash_trt.servers.dynamo.prefix_events import PrefixEvents
from dflash_trt.servers.dynamo.settings import sampling_defaults, shared_card, write_card

TEMPLATE = "{% for message in messages %}{{ thinks }}/{{ style }}/{{ tags }}: {{ message.content }}{% endfor %}"
OPTIONS = {"thinks": False, "style": 'calm "now"', "tags": ["a", None, {"b": 1}]}


@pytest.fixture
def engine(demo: Path, tmp_path: Path) -> EngineDir:
    """With chat template options, and a template that shows them."""
    found = EngineDir.open(demo)
    (tmp_path / "engine").mkdir()
    tokenizer = tmp_path / "engine" / "tokenizer"
    tokenizer.mkdir()
    for path in (demo / "tokenizer").iterdir():
        (tokenizer / path.name).write_bytes(path.read_bytes())
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE)
    return replace(
        found, path=tmp_path / "engine", manifest=found.manifest.model_copy(update={"chat_template_options": OPTIONS})
    )


def test_options_of_an_engine_are_defaults_of_its_template(engine: EngineDir, tmp_path: Path) -> None:
    card = tmp_path / "card"
    card.mkdir()
    write_card(engine, card)
    template = StoredTokenizer.open(card).chat_template(has_tools=False)
    renderer, messages = TemplateRenderer(), [{"role": "user", "content": "x"}]
    assert renderer.render(template, messages, {}) == renderer.render(TEMPLATE, messages, OPTIONS)
    own = {"thinks": True, "style": "loud"}
    assert renderer.render(template, messages, own) == renderer.render(TEMPLATE, messages, OPTIONS | own)


def test_a_card_without_options_is_the_tokenizer_itself_and_others_have_one_place(
    engine: EngineDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_trt.servers.dynamo.settings.gettempdir", lambda: str(tmp_path))
    plain = replace(engine, manifest=engine.manifest.model_copy(update={"chat_template_options": {}}))
    assert shared_card(plain) == plain.path / "tokenizer"
    card = shared_card(engine)
    assert shared_card(engine) == card != engine.path / "tokenizer"
    assert json.loads((card / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_a_card_is_not_written_where_another_user_can_write(
    engine: EngineDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_trt.servers.dynamo.settings.gettempdir", lambda: str(tmp_path))
    card = shared_card(engine)
    assert card.stat().st_mode & 0o777 == 0o700
    victim = tmp_path / "victim"
    card.rename(victim)
    before = {path.name: path.stat().st_mtime_ns for path in victim.iterdir()}
    card.symlink_to(victim)
    with pytest.raises(ConfigError, match=r"only this user can write, found a link.*TMPDIR"):
        shared_card(engine)
    assert {path.name: path.stat().st_mtime_ns for path in victim.iterdir()} == before
    card.unlink()
    card.mkdir()
    for mode in (0o777, 0o720, 0o702):
        card.chmod(mode)
        with pytest.raises(ConfigError, match=f"found one of mode {mode:o}"):
            shared_card(engine)
    card.chmod(0o700)
    if os.geteuid() == 0:  # only root can give a directory away
        os.chown(card, 12345, 12345)
        with pytest.raises(ConfigError, match="found one of user 12345"):
            shared_card(engine)
    assert list(card.iterdir()) == []


def test_generation_config_gives_the_defaults_of_sampling(engine: EngineDir) -> None:
    assert sampling_defaults(engine) == {"temperature": 1.0}
    path = engine.path / "tokenizer" / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_length": 7, "min_p": None}))
    assert sampling_defaults(engine) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    path.write_text(json.dumps({"min_p": 0.05, "repetition_penalty": 1.1}))
    assert sampling_defaults(engine) == {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.1}


class Router:
    """Takes the place of Dynamo's publisher."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, list[int], str | None]] = {}

    def publish_stored(self, token_ids: Any, num_block_tokens: Any, block_hashes: Any, parent_hash: Any = None,
                       *, cache_salt: str | None = None) -> None:  # fmt: skip
        assert (num_block_tokens, len(block_hashes)) == ([len(token_ids)], 1)
        assert parent_hash is None or parent_hash in self.blocks
        self.blocks[block_hashes[0]] = (parent_hash, token_ids, cache_salt)

    def publish_removed(self, block_hashes: list[int]) -> None:
        for block_hash in block_hashes:
            del self.blocks[block_hash]


def published(*notes: tuple[Any, ...]) -> Router:
    router, events = Router(), PrefixEvents()
    events.publish_to(router)
    for name, *arguments in notes:
        getattr(events, name)(*arguments)
    events.start(lambda: None)
    events.close()
    return router


def test_blocks_are_published_after_their_parents_and_removed() -> None:
    first, second = ("stored", 4, None, (1, 2), ""), ("stored", 9, 4, (3, 4), "")
    router = published(first, second)
    (one, two) = router.blocks
    assert router.blocks == {one: (None, [1, 2], None), two: (one, [3, 4], None)}
    assert set(published(first, second, ("removed", 9)).blocks) == {one}
    again = published(("stored", 7, None, (1, 2), ""), ("stored", 8, 7, (3, 4), ""))
    assert list(again.blocks) == [one, two], "blocks of equal contents have equal hashes on every replica"
    assert list(published(("stored", 4, None, (1, 2), "mine")).blocks) != [one], "a salt parts them"


def test_hashes_of_blocks_are_equal_in_every_process() -> None:
    code = "from tests.servers.dynamo.test_model_card import published\n"
    code += "print(*published(('stored', 4, None, (1, 2), 'mine'), ('stored', 5, 4, (3,), 'mine')).blocks)"
    words = [sys.executable, "-c", code]
    found = {
        subprocess.run(words, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
