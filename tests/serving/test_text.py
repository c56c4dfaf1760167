"""Text in and out, piece by piece."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders

from dflash_trt.core.errors import EngineDirError, RequestError
from dflash_trt.serving.detokenizer import ByteDetokenizer, ByteFallbackDetokenizer, Detokenizer, WindowDetokenizer
from dflash_trt.serving.text import TextCodec
from tests.serving.tokenizers import (
    CHAT_TEMPLATE,
    TEXTS,
    save,
    write_byte_fallback,
    write_byte_level,
    write_metaspace,
    write_plain_bytes,
    write_word_pieces,
)

FEW = settings(deadline=None, max_examples=150)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.open(write_byte_level(tmp_path_factory.mktemp("byte_level"), chat_template=CHAT_TEMPLATE))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.open(write_byte_fallback(tmp_path_factory.mktemp("byte_fallback")))


def pieces(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    """Token by token."""
    return [*(detokenizer.push((token_id,)) for token_id in token_ids), detokenizer.flush()]


def ends_inside_a_character(text: str) -> bool:
    return text.endswith("\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_never_split_a_character(
    byte_level: TextCodec, byte_fallback: TextCodec, text: str
) -> None:
    for codec in (byte_level, byte_fallback):
        got = pieces(codec.detokenizer(), codec.encode(text))
        assert "".join(got) == text
        assert not any(ends_inside_a_character(piece) for piece in got)


def test_a_character_comes_out_with_its_last_byte(tmp_path: Path) -> None:
    codec = TextCodec.open(write_plain_bytes(tmp_path))
    assert pieces(codec.detokenizer(), codec.encode("é🙂")) == ["", "é", "", "", "", "🙂", ""]


@FEW
@given(st.lists(st.integers(0, 420), max_size=40))
def test_any_tokens_give_the_text_of_decoding_them_at_once(byte_level: TextCodec, token_ids: list[int]) -> None:
    """Specials, an added token, invalid bytes and ids beyond the vocabulary included."""
    assert "".join(pieces(byte_level.detokenizer(), token_ids)) == byte_level.decode(token_ids)


@FEW
@given(st.lists(st.integers(0, 420), max_size=12))
def test_the_window_agrees_with_the_bytes(byte_level: TextCodec, token_ids: list[int]) -> None:
    window = "".join(pieces(WindowDetokenizer(byte_level.decode), token_ids))
    assert window == byte_level.decode(token_ids)


@FEW
@given(st.text(alphabet="ab 你好é.", max_size=30))
def test_byte_fallback_text_comes_back(byte_fallback: TextCodec, text: str) -> None:
    token_ids = byte_fallback.encode(text) if text else []
    assert "".join(pieces(byte_fallback.detokenizer(), token_ids)) == byte_fallback.decode(token_ids)


@pytest.fixture(scope="module", params=["llama 2", "gemma", "pieces like bytes"])
def any_byte_fallback(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    path = tmp_path_factory.mktemp("decoders")
    if request.param == "llama 2":
        return TextCodec.open(write_byte_fallback(path))
    if request.param == "gemma":
        return TextCodec.open(write_byte_fallback(path, strips_first_space=False))
    return TextCodec.open(
        write_byte_fallback(path, more_pieces=("<0x+1>", "<0xe4>", "<0x 1>", "<0x-1>", "a▁", "▁▁", "�"))
    )


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_any_tokens_of_a_byte_fallback_tokenizer_give_the_text_of_decoding_them_at_once(
    any_byte_fallback: TextCodec, data: st.DataObject
) -> None:
    """Runs of bytes that are UTF-8, that are not, that are cut; specials within them; ids beyond the vocabulary."""
    of_characters = st.sampled_from(["é", "你好", "🙂", " ", "\0", "é\ud800"]).map(
        lambda text: text.encode(errors="surrogatepass")
    )
    byte_runs = st.one_of(of_characters, st.binary(max_size=5)).map(lambda run: [3 + byte for byte in run])
    others = st.lists(st.integers(0, 2) | st.integers(259, 300), max_size=3)
    token_ids = [token_id for part in data.draw(st.lists(byte_runs | others, max_size=8)) for token_id in part]
    detokenizer = any_byte_fallback.detokenizer()
    assert isinstance(detokenizer, ByteFallbackDetokenizer)
    assert "".join(pieces(detokenizer, token_ids)) == any_byte_fallback.decode(token_ids)


def test_a_run_of_bytes_comes_out_when_it_is_decided(byte_fallback: TextCodec) -> None:
    run = [3 + byte for byte in "é🙂".encode()]
    letter = byte_fallback.encode("x")[-1]
    assert pieces(byte_fallback.detokenizer(), [letter, *run, letter]) == ["x", "", "", "", "", "", "", "é🙂x", ""]
    broken = [*run[:2], 3 + 0xFF, run[0], letter]
    assert pieces(byte_fallback.detokenizer(), broken) == ["", "", "���", "�", "x", ""]


@FEW
@given(st.lists(st.integers(0, 40), max_size=30))
@pytest.mark.parametrize("kind", ["metaspace", "word pieces"])
def test_any_tokens_of_other_tokenizers_give_the_text_of_decoding_them_at_once(
    other_tokenizers: dict[str, TextCodec], kind: str, token_ids: list[int]
) -> None:
    codec = other_tokenizers[kind]
    detokenizer = codec.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    assert "".join(pieces(detokenizer, token_ids)) == codec.decode(token_ids)


@pytest.fixture(scope="module")
def other_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextCodec]:
    return {
        "metaspace": TextCodec.open(write_metaspace(tmp_path_factory.mktemp("metaspace"))),
        "word pieces": TextCodec.open(write_word_pieces(tmp_path_factory.mktemp("word_pieces"))),
    }


@FEW
@given(st.lists(st.lists(st.integers(0, 420), max_size=30), max_size=6))
@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "metaspace", "word pieces"])
def test_tokens_pushed_in_groups_give_the_text_of_decoding_them_at_once(
    byte_level: TextCodec,
    byte_fallback: TextCodec,
    other_tokenizers: dict[str, TextCodec],
    kind: str,
    groups: list[list[int]],
) -> None:
    codec = (other_tokenizers | {"byte level": byte_level, "byte fallback": byte_fallback})[kind]
    detokenizer = codec.detokenizer()
    text = "".join([*(detokenizer.push(group) for group in groups), detokenizer.flush()])
    assert text == codec.decode([token_id for group in groups for token_id in group])


def test_a_group_that_ends_inside_a_character_gives_all_text_before_it(byte_level: TextCodec) -> None:
    """However long it is: the window would hold no more than 16 tokens back one by one."""
    text = "one two three four five six seven eight nine ten 🙂"
    token_ids = byte_level.encode(text)
    assert byte_level.decode(token_ids[:-1])[-1] == "\N{REPLACEMENT CHARACTER}", "the last character is cut"
    for detokenizer in (byte_level.detokenizer(), WindowDetokenizer(byte_level.decode)):
        first = detokenizer.push(token_ids[:-1])
        assert first.rstrip(" ") == "one two three four five six seven eight nine ten"
        assert first + detokenizer.push(token_ids[-1:]) == text


def test_byte_level_tokenizers_use_bytes(byte_level: TextCodec) -> None:
    assert isinstance(byte_level.detokenizer(), ByteDetokenizer)


def test_special_tokens_give_no_text_and_an_added_token_does(byte_level: TextCodec) -> None:
    token_ids = byte_level.encode("a<|im_end|>b<my thïnk>c")
    assert byte_level.encode("<|im_end|>")[0] in token_ids
    assert "".join(pieces(byte_level.detokenizer(), token_ids)) == "ab<my thïnk>c"


def test_bytes_that_never_become_a_character_are_replaced_at_the_end(tmp_path: Path) -> None:
    codec = TextCodec.open(write_plain_bytes(tmp_path))
    half = codec.encode("🙂")[:3]
    assert pieces(codec.detokenizer(), half) == ["", "", "", "\N{REPLACEMENT CHARACTER}"]


def decoding(codec: TextCodec, decoder: decoders.Decoder, path: Path) -> TextCodec:
    """The same vocabulary with another decoder."""
    tokenizer = Tokenizer.from_str(codec.backend.to_str())
    tokenizer.decoder = decoder
    return TextCodec.open(save(tokenizer, path, None))


@pytest.mark.parametrize(
    ("steps", "is_known"),
    [
        ([decoders.ByteFallback()], True),
        ([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)], True),
        ([decoders.Replace("▁", " "), decoders.Replace("a", "b"), decoders.ByteFallback(), decoders.Fuse()], True),
        ([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip("x", 1, 0)], False),
        ([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)], False),
        ([decoders.Replace(Regex("▁+"), " "), decoders.ByteFallback(), decoders.Fuse()], False),
        ([decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()], False),
        ([decoders.Fuse(), decoders.ByteFallback()], False),
    ],
)
def test_a_decoder_is_followed_where_it_is_known(byte_fallback: TextCodec, tmp_path, steps, is_known) -> None:
    codec = decoding(byte_fallback, decoders.Sequence(steps), tmp_path)
    assert isinstance(codec.detokenizer(), ByteFallbackDetokenizer) == is_known
    if is_known:
        (space,) = (codec.backend.token_to_id("▁"),)
        letter = codec.backend.token_to_id("a")
        for token_ids in ([space, space, space, letter], [space, letter, space, 3 + 0xC3, 3 + 0xA9], [letter, space]):
            assert "".join(pieces(codec.detokenizer(), token_ids)) == codec.decode(token_ids)


def test_bytes_of_a_window_are_held_for_as_long_as_a_character_may_last() -> None:
    """Sixteen tokens, then what cannot become text is given out."""
    codes = {token: "\N{REPLACEMENT CHARACTER}" * token for token in range(40)}
    detokenizer = WindowDetokenizer(lambda token_ids: codes[len(token_ids)])
    assert [len(detokenizer.push([1])) for _ in range(17)] == [0] * 16 + [17]


# Chat


def test_a_conversation_ends_where_the_assistant_answers(byte_level: TextCodec) -> None:
    token_ids = byte_level.encode_chat([{"role": "user", "content": "hi <b>"}])
    assert token_ids == byte_level.encode("<|im_start|>user\nhi <b><|im_end|>\n<|im_start|>assistant\n")


def test_template_options_reach_the_template(byte_level: TextCodec) -> None:
    token_ids = byte_level.encode_chat([{"role": "user", "content": "hi"}], {"shout": True})
    assert byte_level.decode(token_ids).endswith("assistant\nOH ")


def test_messages_the_template_refuses_are_refused(byte_level: TextCodec) -> None:
    with pytest.raises(RequestError, match="unknown role wizard"):
        byte_level.encode_chat([{"role": "wizard", "content": "hi"}])
    with pytest.raises(RequestError, match="messages that the chat template takes"):
        byte_level.encode_chat([{"content": "hi"}])


def test_a_chat_without_a_template_is_refused(byte_fallback: TextCodec) -> None:
    with pytest.raises(RequestError, match="expected a tokenizer with a chat template, found none"):
        byte_fallback.encode_chat([{"role": "user", "content": "hi"}])


def test_text_that_is_not_unicode_is_refused(byte_level: TextCodec) -> None:
    with pytest.raises(RequestError, match="expected valid Unicode text"):
        byte_level.encode("a\udcffb")


# Opening


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineDirError, match=r"expected tokenizer\.json"):
        TextCodec.open(tmp_path)


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(EngineDirError, match="that transformers can load"):
        TextCodec.open(tmp_path)


def test_a_tokenizer_file_alone_is_enough(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    codec = TextCodec.open(tmp_path)
    assert codec.decode(codec.encode("hello")) == "hello"
