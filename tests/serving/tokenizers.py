"""Tokenizers made on the spot: byte-level (as Llama 3 and Qwen have) and with byte fallback (as Llama 2 has)."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from tests.factories import write_tokenizer

TEXTS = [
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "The quick brown fox — naïve, café, Übermut — 你好 世界 🙂👩‍👩‍👧 end.",
    "one two three  four\tfive\r\nsix",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if add_generation_prompt and shout is defined and shout %}OH {% endif %}"
)


def write_byte_level(path: Path, *, chat_template: str | None = None) -> Path:
    """Byte-level BPE with merges, two special tokens and one added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<my thïnk>", special=False)])
    return save(tokenizer, path, chat_template)


def write_byte_fallback(path: Path, *, strips_first_space: bool = True, more_pieces: tuple[str, ...] = ()) -> Path:
    """BPE over characters, "▁" for spaces, bytes as <0xNN> for what the vocabulary lacks; ids 3 to 258 are the bytes.

    Llama 2 strips the first space again, Gemma does not.
    """
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz.你",
        *more_pieces,
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps if strips_first_space else steps[:-1])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return save(tokenizer, path, None)


def write_panicking(path: Path) -> Path:
    """Byte-level, with a regex that gives up on many "a" before another letter: the library panics then."""
    tokenizer = Tokenizer.from_file(str(write_byte_level(path) / "tokenizer.json"))
    hopeless = pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([hopeless, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return save(tokenizer, path, None)


def write_metaspace(path: Path, *, more_pieces: tuple[str, ...] = ()) -> Path:
    """Unigram, as T5 has: "▁" begins a word."""
    pieces = ["<unk>", "</s>", *("▁" + letter for letter in "abcde"), *"abcde.,", "▁", "▁▁", *more_pieces]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return save(tokenizer, path, None)


def write_word_pieces(path: Path, *, lowercase: bool = True, more_pieces: tuple[str, ...] = ()) -> Path:
    """As BERT has: "##" continues a word, and white space is dropped."""
    pieces = ["[UNK]", "[SEP]", *"abcde.,'", *("##" + letter for letter in "abcde"), "n't", "' ve", *more_pieces]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return save(tokenizer, path, None)


def write_plain_bytes(path: Path) -> Path:
    """One token per byte, no merges."""
    write_tokenizer(path)
    return path


def save(tokenizer: Tokenizer, path: Path, chat_template: str | None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if chat_template is not None:
        fields["chat_template"] = chat_template
    (path / "tokenizer_config.json").write_text(json.dumps(fields))
    return path
