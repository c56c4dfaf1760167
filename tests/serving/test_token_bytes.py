"""Prompts refused by their length alone, before they are tokenized: none of them would have fitted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from dflash_trt.core.errors import RequestError
from dflash_trt.serving.text import TextCodec
from tests.serving.tokenizers import CHAT_TEMPLATE, save, write_byte_fallback, write_byte_level, write_word_pieces

FEW = settings(deadline=None, max_examples=300)
TEXTS = st.text("aA \n\N{KELVIN SIGN}\N{MATHEMATICAL BOLD CAPITAL A}é你가\N{COMBINING ACUTE ACCENT}🙂", max_size=40)


def write_composing(path: Path) -> Path:
    """As Qwen: NFC, byte-level. The vocabulary has every byte and one long piece."""
    tokenizer = Tokenizer(models.BPE(vocab=_bytes("aaaa"), merges=[("a", "a"), ("aa", "aa")]))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<A K>", normalized=True)])
    return save(tokenizer, path, None)


def _bytes(*more: str) -> dict[str, int]:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "aa", *more]
    return {piece: index for index, piece in enumerate(pieces)}


def changed(path: Path, change: Callable[[Tokenizer], Any]) -> TextCodec:
    """A byte-level tokenizer with a change."""
    tokenizer = Tokenizer.from_file(str(write_byte_level(path) / "tokenizer.json"))
    change(tokenizer)
    return TextCodec.open(save(tokenizer, path, None))


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextCodec]:
    writers = {"byte-level": write_byte_level, "byte fallback": write_byte_fallback, "composing": write_composing}
    return {name: TextCodec.open(write(tmp_path_factory.mktemp("codec"))) for name, write in writers.items()}


@FEW
@given(text=TEXTS)
@example(text="<|im_start|><my thïnk>" * 3)
@example(text="\N{MATHEMATICAL BOLD CAPITAL A}" * 40)
@example(text="<\N{MATHEMATICAL BOLD CAPITAL A} \N{KELVIN SIGN}>" * 3)
@pytest.mark.parametrize("kind", ["byte-level", "byte fallback", "composing"])
def test_no_text_that_fits_is_refused(codecs: dict[str, TextCodec], kind: str, text: str) -> None:
    codec = codecs[kind]
    num_tokens = len(codec.encode(text))
    assert len(text.encode()) <= codec.max_text_bytes(num_tokens)
    assert codec.encode(text, max_tokens=num_tokens) == codec.encode(text)
    if num_tokens:
        with pytest.raises(RequestError, match=f"expected at most .*, found ({num_tokens}|{len(text.encode())})"):
            codec.encode(text, max_tokens=num_tokens - 1)


@pytest.mark.parametrize(
    ("kind", "bytes_per_token"),
    [
        ("byte-level", len(" 🙂👩‍👩‍👧".encode())),
        ("byte fallback", len(b"<0x00>")),
        ("composing", 5 * 4 * 4),  # "<A K>" in lower case, where each byte may have been 4, twice
    ],
)
def test_the_bound_follows_the_longest_token(codecs: dict[str, TextCodec], kind: str, bytes_per_token: int) -> None:
    assert codecs[kind].max_text_bytes(1000) == 1000 * bytes_per_token


def test_a_long_text_is_refused_without_tokenizing_it(codecs: dict[str, TextCodec], monkeypatch) -> None:
    codec = codecs["byte-level"]
    monkeypatch.setattr(codec, "_backend", None)  # whoever asks it fails
    with pytest.raises(RequestError, match=r"expected at most 2300 bytes, .*max_seq_len.*found 4000000"):
        codec.encode("x" * 4_000_000, max_tokens=100)


def write_replacing(path: Path) -> Path:
    """Four letters become one, which is a token; what is unknown is a token for each character."""
    vocab = {piece: index for index, piece in enumerate(["?", *"abé", "ab"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")], unk_token="?"))
    tokenizer.normalizer = normalizers.Replace("aaaa", "b")
    return save(tokenizer, path, None)


@FEW
@given(text=st.text("abcdé🙂", max_size=30))
@example(text="aaaa" * 10)
@example(text="🙂" * 10)
def test_no_text_that_becomes_shorter_is_refused(replacing: TextCodec, text: str) -> None:
    assert len(text.encode()) <= replacing.max_text_bytes(len(replacing.encode(text)))
    assert replacing.max_text_bytes(10) == 10 * 4 * 4  # bytes of a character, each of which may have been four


@pytest.fixture(scope="module")
def replacing(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.open(write_replacing(tmp_path_factory.mktemp("replacing")))


def _fuse_unknown(tokenizer: Tokenizer) -> None:
    vocab = {piece: index for index, piece in enumerate(["<unk>", "a"])}
    tokenizer.model = models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")


def test_unknown_characters_that_become_one_token_may_be_many(tmp_path: Path) -> None:
    codec = changed(tmp_path, _fuse_unknown)
    assert len(codec.encode("x" * 100_000, max_tokens=1)) == 1


def test_a_doubtful_limit_grows_with_the_longest_token(tmp_path: Path) -> None:
    codec = TextCodec.open(write_word_pieces(tmp_path, more_pieces=("x" * 40,)))
    assert (codec.max_text_bytes(10), codec.max_text_bytes(10_000)) == (2**20, 10_000 * 40 * 16)


def _strip(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Strip()


def _collapse(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "")])


def _swallow(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("<|greedy|>", rstrip=True)])


def _drop_spaces(tokenizer: Tokenizer) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), byte_level])


def _remove_spaces(tokenizer: Tokenizer) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), byte_level])


@pytest.mark.parametrize("change", [_strip, _collapse, _swallow, _drop_spaces, _remove_spaces])
def test_a_tokenizer_that_drops_text_gets_a_lavish_limit(tmp_path: Path, change: Callable[[Tokenizer], Any]) -> None:
    codec = changed(tmp_path, change)
    text = "<|greedy|>" + " " * 1_000_000
    assert len(codec.encode(text, max_tokens=12)) <= 12
    with pytest.raises(RequestError, match="expected at most 1048576 bytes"):
        codec.encode(text + " " * 100_000, max_tokens=12)


def test_unknown_words_may_be_of_any_length(tmp_path: Path) -> None:
    codec = TextCodec.open(write_word_pieces(tmp_path))
    assert len(codec.encode("é" * 100_000, max_tokens=1)) == 1


def test_a_conversation_is_bound_by_its_rendered_text(tmp_path: Path) -> None:
    codec = TextCodec.open(write_byte_level(tmp_path, chat_template=CHAT_TEMPLATE))
    messages = [{"role": "user", "content": "hi", "left_out_by_the_template": "x" * 500_000}]
    fits = codec.encode_chat(messages)
    assert codec.encode_chat(messages, max_tokens=len(fits)) == fits
    with pytest.raises(RequestError, match=rf"expected at most {len(fits) - 1} tokens"):
        codec.encode_chat(messages, max_tokens=len(fits) - 1)
    with pytest.raises(RequestError, match=r"at most 2300 bytes, .*found 200050"):
        codec.encode_chat([{"role": "user", "content": "x" * 200_000}], max_tokens=100)
    with pytest.raises(RequestError, match="at most 1048576 bytes of messages"):
        codec.encode_chat([{"role": "user", "content": "x" * 2_000_000}], max_tokens=100)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_failure_of_the_text(codecs: dict[str, TextCodec], monkeypatch, error: Any) -> None:
    class Interrupted:
        def encode_batch_fast(self, *texts: Any, **options: Any) -> None:
            raise error

    monkeypatch.setattr(codecs["byte-level"], "_backend", Interrupted())
    with pytest.raises(error):
        codecs["byte-level"].encode("a")
