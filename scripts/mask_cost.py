"""Host time for the masks of structured output, by the number of requests and drafts.

The vocabulary has as many tokens as Qwen3's, made of the words of Python's standard library. Every request is somewhere
else in a JSON schema, with drafts that follow it.
"""

import json
import re
import statistics
import sysconfig
import time
from collections import Counter
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dflash_trt.core.constraint import MaskedBlock
from dflash_trt.core.sampling import SamplingParams
from dflash_trt.serving.grammar import GrammarCompiler, GrammarMatcher

VOCAB_SIZE = 151_936
NUM_ROUNDS = 30
PROPERTIES = {
    "name": {"type": "string", "maxLength": 40},
    "kind": {"enum": ["book", "article", "report"]},
    "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
    "authors": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
    "rating": {"anyOf": [{"type": "number"}, {"type": "null"}]},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES), "additionalProperties": False}
TEXT = '{"name": "The Origin of Species", "kind": "book", "year": 1959, "authors": ["Charles Darwin"], "rating": 4.5}'


def make_tokenizer() -> Tokenizer:
    """Byte-level, with the most frequent pieces of the standard library as tokens."""
    counts: Counter[str] = Counter()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for word in re.findall(r"\s?\w+|\s?[^\w\s]+|\s+", path.read_text(errors="ignore")):
            counts.update(word[:n] for n in range(2, min(len(word), 12) + 1))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = dict.fromkeys(alphabet)
    for word, _ in counts.most_common():
        pieces["".join(piece for piece, _ in byte_level.pre_tokenize_str(word))] = None
        if len(pieces) == VOCAB_SIZE - 1:
            break
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def positions(compiler: GrammarCompiler, token_ids: list[int], num_requests: int) -> list[tuple[GrammarMatcher, int]]:
    """Matchers at different tokens of the text."""
    grammar = compiler.compile(SamplingParams(json_schema=SCHEMA))
    found = []
    for i in range(num_requests):
        matcher, start = grammar.start(()), i * 7 % (len(token_ids) - 8)
        assert matcher.advance(token_ids[:start]) == start
        found.append((matcher, start))
    return found


def main() -> None:
    tokenizer = make_tokenizer()
    started = time.perf_counter()
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.get_vocab_size())
    compiler.compile(SamplingParams(json_schema=SCHEMA))
    print(f"tokenizer of {tokenizer.get_vocab_size()} tokens and first grammar: {time.perf_counter() - started:.2f} s")
    other = SamplingParams(json_schema=json.dumps(SCHEMA | {"title": "other"}))
    started = time.perf_counter()
    compiler.compile(other)
    print(f"another grammar: {1e3 * (time.perf_counter() - started):.1f} ms")
    started = time.perf_counter()
    compiler.compile(other)
    print(f"a grammar in the cache: {1e3 * (time.perf_counter() - started):.3f} ms")
    token_ids = [tokenizer.token_to_id(char if char != " " else "Ġ") for char in TEXT]
    for num_requests in (1, 8, 64):
        for num_draft_tokens in (0, 7):
            report(compiler, token_ids, num_requests, num_draft_tokens)


def report(compiler: GrammarCompiler, token_ids: list[int], num_requests: int, num_draft_tokens: int) -> None:
    places = positions(compiler, token_ids, num_requests)
    blocks = [MaskedBlock(matcher, token_ids[start : start + num_draft_tokens]) for matcher, start in places]
    assert all(block.matcher.num_allowed(block.draft_tokens) == num_draft_tokens for block in blocks)
    bits = np.empty((num_requests * (num_draft_tokens + 1), blocks[0].matcher.num_mask_words), np.int32)
    times_s = []
    for _ in range(NUM_ROUNDS):
        started = time.perf_counter()
        for block in blocks:
            block.matcher.num_allowed(block.draft_tokens)
        GrammarMatcher.fill_masks(blocks, bits)
        times_s.append(time.perf_counter() - started)
    total_ms = 1e3 * statistics.median(times_s)
    print(
        f"{num_requests:3} requests, K = {num_draft_tokens}: {total_ms:7.2f} ms a step, "
        f"{1e3 * total_ms / len(bits):6.1f} us a row"
    )


if __name__ == "__main__":
    main()
