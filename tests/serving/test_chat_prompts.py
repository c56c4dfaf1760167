"""A conversation gets the tokens that transformers gives it, special ones around the text included."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from dflash_trt.serving.prompts import PromptReader
from dflash_trt.serving.text import TextCodec
from tests.serving.tokenizers import CHAT_TEMPLATE, write_byte_level

BEGIN = "<|endoftext|>"  # stands for a BOS
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """As Llama 3 has it: the tokenizer begins every text with a BOS, and so does the template."""
    write_byte_level(tmp_path, chat_template=BEGIN + CHAT_TEMPLATE)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": BEGIN}))
    return tmp_path


def test_special_tokens_come_once_in_a_chat_prompt_and_once_in_a_plain_one(path: Path) -> None:
    codec, tokenizer = TextCodec.open(path), AutoTokenizer.from_pretrained(path)
    begin = tokenizer.convert_tokens_to_ids(BEGIN)
    chat = codec.encode_chat(MESSAGES)
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert chat == expected and chat.count(begin) == 1
    plain = codec.encode("hello")
    assert plain == tokenizer.encode("hello") and plain.count(begin) == 1


def test_a_prompt_reader_gives_conversations_and_plain_texts_their_own_tokens(path: Path) -> None:
    codec = TextCodec.open(path)
    reader = PromptReader(codec, vocab_size=500)
    options = {"shout": True}
    assert reader.read({"messages": MESSAGES}) == tuple(codec.encode_chat(MESSAGES))
    with_options = {"messages": MESSAGES, "chat_template_kwargs": options}
    assert reader.read(with_options) == tuple(codec.encode_chat(MESSAGES, options))
    assert reader.read(with_options) != reader.read({"messages": MESSAGES})
    assert reader.read("hello") == reader.read({"prompt": "hello"}) == tuple(codec.encode("hello"))
