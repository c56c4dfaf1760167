"""Index of the n-grams of a text that grows, which finds what followed the last tokens before.

Exact up to its two limits, as a suffix automaton is, in two fifths of the memory and a quarter of the time for a prompt
(docs/log.md).
"""

# From this length on a match gives better drafts than the demo's drafter: docs/benchmarks.md. TensorRT-LLM's suffix
# automaton overrides drafts from 4 on by default (`SAEnhancerConfig.threshold`).
MIN_MATCH = 5
_MAX_MATCH = 32  # tokens compared; longer matches count as equal, and the latest wins
_MAX_PLACES = 64  # earlier places compared, the latest first


class NgramIndex:
    """The places of every n-gram of MIN_MATCH tokens in a text that grows.

    A token costs one dictionary access, and a match at most _MAX_PLACES comparisons.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}  # the end of each n-gram's latest place
        self._before: list[int] = []  # by the end of a place less MIN_MATCH: the end of the place before it, or 0

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: list[int]) -> None:
        start = max(0, len(self._tokens) - MIN_MATCH + 1)
        self._tokens += token_ids
        tail = self._tokens[start:]
        grams = zip(*(tail[i:] for i in range(MIN_MATCH)), strict=False)
        for end, gram in enumerate(grams, start + MIN_MATCH):
            self._before.append(self._last.get(gram, 0))
            self._last[gram] = end

    def drafts(self, num_drafts: int) -> list[int]:
        """The tokens after the longest match, repeated where the text ends; none without a match."""
        end = self._longest_match()
        if not end:
            return []
        following = self._tokens[end : end + num_drafts]
        period = len(self._tokens) - end
        return [following[i % period] for i in range(num_drafts)]

    def _longest_match(self) -> int:
        """The end of the latest of the longest matches of the text's last tokens, or 0."""
        tokens, num_tokens = self._tokens, len(self._tokens)
        longest, found = 0, 0
        end = self._before[-1] if self._before else 0
        for _ in range(_MAX_PLACES):
            if not end or longest == _MAX_MATCH:
                break
            length, most = MIN_MATCH, min(end, _MAX_MATCH)
            while length < most and tokens[end - 1 - length] == tokens[num_tokens - 1 - length]:
                length += 1
            if length > longest:
                longest, found = length, end
            end = self._before[end - MIN_MATCH]
        return found
