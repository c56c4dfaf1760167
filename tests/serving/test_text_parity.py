"""An engine's text is that of transformers: token ids, decoded text and chat templates, without importing it."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, processors
from transformers import AutoTokenizer

from dflash_trt.checkpoint.vocabulary import tokenizer_files
from dflash_trt.core.errors import RequestError
from dflash_trt.engine_dir import tokenizer_dir
from dflash_trt.serving.text import TextCodec
from tests.factories import edit_json
from tests.serving.tokenizers import TEXTS, write_byte_fallback, write_byte_level, write_metaspace, write_word_pieces

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
PROMPTS = [
    *TEXTS,
    "",
    " ",
    "<s>a</s> <|im_start|>user\nhi<|im_end|> <my thïnk> [MASK] <think>",
    "é\0\u200b 1234567890 I'll we've\r\n\t\t x",
]


def store(source: Path, engine: Path) -> Path:
    """What a build stores."""
    problems: list[str] = []
    files = tokenizer_dir.resolve_tokenizer(tokenizer_files(source), vocab_size=2000, problems=problems)
    assert not problems
    engine.mkdir()
    for name, content in files.items():
        (engine / name).write_bytes(content)
    return engine


def edited(path: Path, change: Callable[[Tokenizer], object] = lambda tokenizer: None, **config: Any) -> Path:
    """Change tokenizer.json, and keys of tokenizer_config.json."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    change(tokenizer)
    tokenizer.save(str(path / "tokenizer.json"))
    edit_json(path / "tokenizer_config.json", **config)
    return path


def _write_cased_word_pieces(path: Path) -> Path:
    return write_word_pieces(path, lowercase=False, more_pieces=("Hello", "##é"))


def _begin_and_end(tokenizer: Tokenizer) -> None:
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)


def _cut_and_pad(tokenizer: Tokenizer) -> None:
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)


def _add_eager(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<|pad|>", lstrip=True, rstrip=True)])
    tokenizer.add_tokens([AddedToken("ïn", normalized=True), AddedToken("word", single_word=True)])


THINK = {"400": {"content": "<think>", "special": False, "lstrip": True, "rstrip": False, "normalized": False}}
# A checkpoint's tokenizer by name: a writer, and what its author did to it.
KINDS: dict[str, Callable[[Path], Path]] = {
    "byte level": write_byte_level,
    "byte level, Qwen's class": lambda path: edited(
        write_byte_level(path), tokenizer_class="Qwen2Tokenizer", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ),
    "byte level, GPT-2's class and a first space": lambda path: edited(
        write_byte_level(path), tokenizer_class="GPT2Tokenizer", add_prefix_space=True
    ),
    "byte level, tokens of the config": lambda path: edited(
        write_byte_level(path), bos_token="<bos>", additional_special_tokens=["<|tool|>"], added_tokens_decoder=THINK
    ),
    "byte level, special tokens split": lambda path: edited(write_byte_level(path), split_special_tokens=True),
    "byte level, cut and padded": lambda path: edited(write_byte_level(path), _cut_and_pad),
    "byte level, eager tokens": lambda path: edited(write_byte_level(path), _add_eager),
    "byte fallback": write_byte_fallback,
    "byte fallback, begin and end": lambda path: edited(
        write_byte_fallback(path), _begin_and_end, bos_token="<s>", eos_token="</s>"
    ),
    "byte fallback, Llama's class": lambda path: edited(
        write_byte_fallback(path),
        tokenizer_class="LlamaTokenizer",
        bos_token="<s>",
        eos_token="</s>",
        add_bos_token=True,
        add_eos_token=True,
        legacy=False,
    ),
    "byte fallback, Gemma's class": lambda path: edited(
        write_byte_fallback(path, strips_first_space=False), tokenizer_class="GemmaTokenizer", bos_token="<s>"
    ),
    "Unigram": lambda path: write_metaspace(path, more_pieces=("▁Hello",)),
    "WordPiece": _write_cased_word_pieces,
    "WordPiece, BERT's post-processor": lambda path: edited(
        _write_cased_word_pieces(path),
        lambda tokenizer: setattr(
            tokenizer, "post_processor", processors.BertProcessing(("[SEP]", 1), ("[UNK]", 0))
        ),
        unk_token="[UNK]",
        sep_token="[SEP]",
        clean_up_tokenization_spaces=True,
    ),
}  # fmt: skip


class Pair:
    """One checkpoint's tokenizer in transformers and in an engine."""

    def __init__(self, source: Path, engine: Path) -> None:
        self.source = source
        self.theirs: Any = AutoTokenizer.from_pretrained(source)
        self.engine = store(source, engine)
        self.ours = TextCodec.open(self.engine)

    def check(self, text: str) -> None:
        assert self.ours.encode(text) == self.theirs.encode(text)
        unframed = self.ours._encode(text, max_tokens=None, add_special_tokens=False)
        assert unframed == self.theirs.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("kind")
    return Pair(KINDS[request.param](path / "source"), path / "engine")


@pytest.mark.parametrize("text", PROMPTS)
def test_a_prompt_has_the_tokens_that_transformers_gives_it(pair: Pair, text: str) -> None:
    pair.check(text)


@settings(deadline=None, max_examples=40)
@given(text=st.text(alphabet=st.sampled_from("abé 你🙂\n\t<s>|▁#'1"), max_size=20))
def test_any_prompt_has_the_tokens_that_transformers_gives_it(pair: Pair, text: str) -> None:
    pair.check(text)


@settings(deadline=None, max_examples=40)
@given(token_ids=st.lists(st.integers(0, 420), max_size=20))
def test_any_tokens_have_the_text_that_transformers_gives_them(pair: Pair, token_ids: list[int]) -> None:
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    assert pair.ours.decode(token_ids) == pair.theirs.decode(token_ids, **options)


def test_transformers_reads_an_engines_tokenizer_as_the_checkpoints(pair: Pair) -> None:
    """Clients count tokens with it."""
    again = AutoTokenizer.from_pretrained(pair.engine)
    assert [again.encode(text) for text in PROMPTS] == [pair.theirs.encode(text) for text in PROMPTS]


def test_the_file_of_the_checkpoint_alone_would_give_other_tokens(tmp_path: Path) -> None:
    """A negative control: classes and configs of transformers do change tokens of these kinds."""
    differing = set()
    for kind, write in KINDS.items():
        source = write(tmp_path / kind)
        theirs, alone = AutoTokenizer.from_pretrained(source), Tokenizer.from_file(str(source / "tokenizer.json"))
        if any(alone.encode(text).ids != theirs.encode(text) for text in PROMPTS):
            differing.add(kind)
    assert differing >= {"byte level, tokens of the config", "byte level, special tokens split"}


# Chat templates

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather <now> & later.\nÉ",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Köln", "O'Hare"]},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["city"],
        },
    },
}
CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": [1]}}}
SYSTEM = {"role": "system", "content": "  Be brief. <b>\n"}
TURNS = [
    {"role": "user", "content": "What's the weather? 'é' \N{PILE OF POO}"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nLet me see.", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"t": 1.5}'},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "Fine."},
    {"role": "user", "content": " Thanks.\n"},
]
CONVERSATIONS = {
    "one turn": TURNS[:1],
    "a system message": [SYSTEM, TURNS[0]],
    "developer": [{"role": "developer", "content": "x"}, TURNS[0]],
    "plain turns": [SYSTEM, TURNS[0], TURNS[4], TURNS[5]],
    "tool calls": [SYSTEM, *TURNS],
    "the tool answers last": TURNS[:4],
    "two users": [TURNS[0], TURNS[5]],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
}
VARIABLES: dict[str, dict[str, Any]] = {
    "none": {},
    "tools": {"tools": [TOOL]},
    "no tools": {"tools": []},
    "documents": {"documents": [{"title": "a", "text": "<b> & c"}, {"title": "ß", "text": ""}]},
    "thinking": {"enable_thinking": True, "reasoning_effort": "high"},
    "no thinking": {"enable_thinking": False, "model_identity": "You're X."},
    "another beginning": {"bos_token": "<begin>", "date_string": "1 Jan 2024"},
}


@pytest.fixture(scope="module", params=sorted(path.name for path in TEMPLATES.iterdir()))
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The template is a file for one half of them, and a key of tokenizer_config.json for the other."""
    path = tmp_path_factory.mktemp("chat")
    source = edited(write_byte_level(path / "source"), bos_token="<|begin|>", eos_token="<|im_end|>")
    template = (TEMPLATES / request.param).read_text()
    if len(request.param) % 2:
        (source / "chat_template.jinja").write_text(template)
    else:
        edit_json(source / "tokenizer_config.json", chat_template=template)
    return Pair(source, path / "engine")


@pytest.mark.parametrize("variables", VARIABLES.values(), ids=VARIABLES)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_a_conversation_has_the_text_that_transformers_renders(
    chat: Pair, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> None:
    """Or both refuse it, with the same words."""
    expected = outcome(
        lambda: chat.theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
    )
    found = outcome(lambda: chat.ours._render(messages, variables, None))
    if isinstance(expected, Exception):
        assert isinstance(found, RequestError) and f"{type(expected).__name__}: {expected}" in str(found)
        return
    assert found == expected
    assert chat.ours.encode_chat(messages, variables) == chat.theirs.encode(expected, add_special_tokens=False)


def outcome(render: Callable[[], str]) -> str | Exception:
    try:
        return render()
    except Exception as error:  # noqa: BLE001 - templates raise whatever they like
        return error


def test_every_template_takes_a_conversation(chat: Pair) -> None:
    """The comparison above is not one of refusals."""
    messages = CONVERSATIONS["plain turns"]
    assert "Fine." in chat.ours._render(messages, {}, None)


def _named(*names: str) -> list[dict[str, str]]:
    return [{"name": name, "template": f"{name} {{{{ messages[0].content }}}}"} for name in names]


@pytest.mark.parametrize(
    "template",
    [_named("default"), _named("default", "tool_use", "rag"), {"default": "d {{ messages[0].content }}"}],
    ids=["default", "three", "an object"],
)
@pytest.mark.parametrize("has_file", [False, True])
def test_a_template_by_name_is_the_one_that_transformers_chooses(tmp_path: Path, template: Any, has_file: bool) -> None:
    source = edited(write_byte_level(tmp_path / "source"), chat_template=template)
    if has_file:
        (source / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    pair = Pair(source, tmp_path / "engine")
    for tools in (None, [], [TOOL]):
        expected = pair.theirs.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True, tools=tools)
        assert pair.ours._render(TURNS[:1], {"tools": tools}, None) == expected


def test_templates_without_a_default_are_refused_at_build(tmp_path: Path) -> None:
    source = edited(write_byte_level(tmp_path / "source"), chat_template=_named("rag"))
    problems: list[str] = []
    assert tokenizer_dir.resolve_tokenizer(tokenizer_files(source), vocab_size=2000, problems=problems) == {}
    assert "tokenizer_config.json: expected a chat template" in problems[0] and "'default'" in problems[0]


def test_a_tokenizer_that_would_give_other_tokens_is_refused_at_build(tmp_path: Path, monkeypatch: Any) -> None:
    source = KINDS["byte level, tokens of the config"](tmp_path / "source")
    monkeypatch.setattr(tokenizer_dir, "_store", lambda tokenizer, source, stored: copytree(source, stored))
    problems: list[str] = []
    assert tokenizer_dir.resolve_tokenizer(tokenizer_files(source), vocab_size=2000, problems=problems) == {}
    assert "tokenizer.json: expected the tokens of transformers for " in problems[0]


def test_special_tokens_with_flags_are_spelled(tmp_path: Path) -> None:
    """tokenizer_config.json may hold a token as an object."""
    token = {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    source = edited(
        write_byte_level(tmp_path / "source", chat_template="{{ eos_token }}{{ messages[0].content }}"),
        eos_token=token | {"__type": "AddedToken"},
    )
    pair = Pair(source, tmp_path / "engine")
    expected = pair.theirs.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True)
    assert pair.ours._render(TURNS[:1], {}, None) == expected == "<|im_end|>" + TURNS[0]["content"]
    assert json.loads((pair.engine / "special_tokens_map.json").read_text())["eos_token"] == "<|im_end|>"
