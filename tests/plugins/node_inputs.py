"""Random inputs of plugin nodes: whole steps, with requests of different lengths and shuffled pages."""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from dflash_trt.backends.logit_rules import mask_tensors
from dflash_trt.core.logit_rules import ANY_TOKEN
from dflash_trt.core.step_plan import TokenMasks
from dflash_trt.kernels.rule_tensors import RuleTensors
from tests.logit_rows import columns_off

PAGE_SIZE = 4
STATE, NUM_STATES = 1, 3
CHUNK = 6  # of positions, of the library that tests build


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """`num_tokens` and `context_lens` of each request; `width` is K + 1."""

    num_tokens: tuple[int, ...]
    context_lens: tuple[int, ...]
    width: int
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = PAGE_SIZE
    window: int = 0
    chunk: int = 0  # of attend_pages
    is_causal: int = 0
    is_window_anchored: int = 0
    vocab_size: int = 5000
    draft_topk: int = 32
    dtype: torch.dtype = torch.float32
    page_dtype: torch.dtype | None = None  # None: dtype
    k_scale: float = 1.0
    v_scale: float = 1.0
    softcap: float = 0.0
    score_scale: float | None = None  # None: head_dim ** -0.5
    has_sinks: int = 0
    shares_kv: int = 0
    first_key: int = 0
    is_adjusted: bool = False  # the rows of sample_and_accept have rules and masks

    @property
    def scales(self) -> dict[str, float]:
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    @property
    def scores(self) -> dict[str, float]:
        scale = self.head_dim**-0.5 if self.score_scale is None else self.score_scale
        return {"softcap": self.softcap, "score_scale": scale}


CASES = {
    "verify": StepCase(num_tokens=(3, 3, 3), context_lens=(9, 0, 21), width=3),
    "prefill": StepCase(num_tokens=(3, 33, 3), context_lens=(14, 5, 2), width=3),  # two of the largest tiles
    "long prefill": StepCase(num_tokens=(3, 35), context_lens=(14, 5), width=3, heads=2),  # beyond a verify block
    "window": StepCase(num_tokens=(4, 4), context_lens=(17, 2), width=4, window=5, is_causal=1),
    "one head": StepCase(num_tokens=(2, 2), context_lens=(6, 30), width=2, heads=8, kv_heads=1, window=3),
    "anchored window": StepCase(num_tokens=(4, 4), context_lens=(17, 2), width=4, window=5, is_window_anchored=1),
    "causal anchored window": StepCase(
        num_tokens=(4, 4), context_lens=(17, 2), width=4, window=5, is_causal=1, is_window_anchored=1
    ),
    "FP8 pages": StepCase(
        num_tokens=(3, 11), context_lens=(14, 5), width=3, page_dtype=torch.float8_e4m3fn, k_scale=0.02, v_scale=0.3
    ),
    "sinks": StepCase(num_tokens=(3, 33), context_lens=(14, 0), width=3, window=6, has_sinks=1),
    "K and V of another layer": StepCase(num_tokens=(3, 11), context_lens=(14, 5), width=3, shares_kv=1),
    "soft cap": StepCase(num_tokens=(3, 33), context_lens=(14, 5), width=3, softcap=1.5),
    "score scale": StepCase(num_tokens=(3, 3), context_lens=(14, 5), width=3, score_scale=0.6),
    "sinks, soft cap and scale": StepCase(
        num_tokens=(4, 4), context_lens=(17, 2), width=4, softcap=2.0, score_scale=0.4, has_sinks=1
    ),
    "chunks": StepCase(num_tokens=(3, 9, 1), context_lens=(4, 3, 12), width=3, chunk=CHUNK),
    "chain": StepCase(num_tokens=(2, 5), context_lens=(0, 14), width=2, is_causal=1, first_key=1),
    "rules and masks": StepCase(num_tokens=(3, 11, 3, 3), context_lens=(9, 6, 21, 14), width=3, is_adjusted=True),
    "one token": StepCase(num_tokens=(1,), context_lens=(0,), width=1, vocab_size=4096, draft_topk=0),
}
ANCHORED = ("anchored window", "causal anchored window")
# A case of the field, and another value of it.
SCORE_FIELDS = {
    ("AttendPages", "has_sinks"): ("sinks", 0),
    ("AttendPages", "chunk"): ("chunks", 0),
    ("AttendPages", "shares_kv"): ("K and V of another layer", 0),
    ("AttendPages", "softcap"): ("soft cap", 0.0),
    ("AttendPages", "score_scale"): ("score scale", 0.25),
    ("AttendDraft", "shares_kv"): ("K and V of another layer", 0),
    ("AttendDraft", "first_key"): ("chain", 0),
    ("AttendDraft", "softcap"): ("soft cap", 0.0),
    ("AttendDraft", "score_scale"): ("score scale", 0.25),
}
# Without one of these, rows of "rules and masks" give other tokens or log probabilities.
READ_RULES = (
    *("row_masks", "mask_bits", "has_rules", "penalties", "num_biases", "bias_tokens", "bias_values", "bias_ends"),
    *("prefixes", "tokens", "num_prompt_tokens"),
)
# Heads and pages are nothing to sampling and drafts, and masks nothing to rows.
SAMPLING_NODES = ("SampleAndAccept", "ScoreRows", "DraftTokens")
SAMPLING_CASES = ("verify", "prefill", "window", "rules and masks", "one token")
# Plugin names, and the methods that make their inputs.
NODES = {
    "AttendPages": "attend_pages",
    "AttendDraft": "attend_draft",
    "WriteDraftContext": "write_draft_context",
    "PreviousRows": "previous_rows",
    "SampleAndAccept": "sample_and_accept",
    "ScoreRows": "score_rows",
    "DraftTokens": "draft_tokens",
}
FEW_CASES = (*SAMPLING_NODES, "PreviousRows")
PAIRS = [
    (node, case)
    for case in CASES
    for node in NODES
    if case in SAMPLING_CASES or node not in FEW_CASES
    if node == "SampleAndAccept" or not CASES[case].is_adjusted
]


def defined(node: str, outputs: list[Tensor]) -> list[Tensor]:
    """Without the last entry of scored rows, which is of nothing."""
    return [part[:-1] for part in outputs] if node == "ScoreRows" else outputs


class NodeInputs:
    """`attend_pages()` and the others give the named inputs and the fields of one node, new tensors each time.

    `pages` are those of the last node made.
    """

    def __init__(self, case: StepCase, device: torch.device, *, seed: int = 0) -> None:
        self.case, self._device = case, device
        self._random = torch.Generator().manual_seed(seed)
        self.pages: Tensor | None = None
        total = max(a + b for a, b in zip(case.num_tokens, case.context_lens, strict=True))
        self._pages_per_request = -(-(total + case.width) // case.page_size)
        self._num_pages = len(case.num_tokens) * self._pages_per_request + 3

    @property
    def written(self) -> list[Tensor]:
        """The pages of the last node made, if it has any."""
        return [] if self.pages is None else [self.pages]

    def attend_pages(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        case, rows = self.case, sum(self.case.num_tokens)
        kv = (rows, case.kv_heads, case.head_dim)
        inputs = {"q": self._floats(rows, case.heads, case.head_dim), "k": self._floats(*kv), "v": self._floats(*kv)}
        inputs |= {"state_pools": self._pools(), "context_lens": self._integers(case.context_lens)}
        inputs |= self._layout() | {"sinks": self._sinks()}
        fields = {name: getattr(case, name) for name in ("window", "chunk", "has_sinks", "shares_kv")}
        return inputs, self._page_fields() | case.scores | fields | {"max_verify_rows": case.width}

    def write_draft_context(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        case, rows = self.case, sum(self.case.num_tokens)
        kv = (rows, case.kv_heads, case.head_dim)
        inputs = {"context_k": self._floats(*kv), "context_v": self._floats(*kv), "state_pools": self._pools()}
        inputs |= self._layout() | {"next_context_lens": self._next()}
        return inputs, self._page_fields()

    def attend_draft(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        case, rows = self.case, len(self.case.num_tokens) * self.case.width
        inputs, fields = self.write_draft_context()
        kv = (rows, case.kv_heads, case.head_dim)
        inputs |= {"q": self._floats(rows, case.heads, case.head_dim)}
        inputs |= {"block_k": self._floats(*kv), "block_v": self._floats(*kv)}
        names = ("window", "is_causal", "is_window_anchored", "first_key", "shares_kv")
        return inputs, fields | case.scores | {name: getattr(case, name) for name in names}

    def previous_rows(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Rows as wide as the heads of K, and one more of no request."""
        case, layout, width = self.case, self._layout(), self.case.kv_heads * self.case.head_dim
        inputs = {"x": self._floats(sum(case.num_tokens) + 1, width)}
        inputs |= {"state_pools": self._pools(self._floats(self._num_pages, case.page_size, width))}
        inputs |= layout | {"positions": torch.nn.functional.pad(layout["positions"], (0, 1))}
        inputs |= {"context_lens": self._integers(case.context_lens)}
        return inputs, {"state": STATE, "page_size": case.page_size}

    def sample_and_accept(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Requests of at least `width` rows verify; drafts agree with the largest logit two times in three."""
        case, requests = self.case, len(self.case.num_tokens)
        layout = self._layout()
        logits = self._floats(requests * case.width, case.vocab_size) * 3
        starts = [sum(case.num_tokens[:r]) for r in range(requests)]
        verifies = [num_tokens == case.width for num_tokens in case.num_tokens]
        logit_rows = [
            [start + (j if verify else num_tokens - 1) for j in range(case.width)]
            for start, num_tokens, verify in zip(starts, case.num_tokens, verifies, strict=True)
        ]
        token_ids = torch.randint(case.vocab_size, (sum(case.num_tokens),), generator=self._random)
        likeliest = logits.float().argmax(dim=1).view(requests, case.width).cpu()
        for r, start in enumerate(starts):
            for j in range(case.width - 1):
                if verifies[r] and torch.rand((), generator=self._random) < 0.67:
                    token_ids[start + j + 1] = likeliest[r, j]
        inputs = (
            self._sampling()
            | self._drawn(logits, token_ids, starts, verifies)
            | {
                "logits": logits,
                "token_ids": token_ids.int().to(self._device),
                "context_lens": self._integers(case.context_lens),
                "logit_rows": torch.tensor(logit_rows, dtype=torch.int32, device=self._device),
                "num_candidates": self._integers([case.width - 1 if verify else 0 for verify in verifies]),
                "positions": layout["positions"],
                "token_offsets": layout["token_offsets"],
            }
            | self._rules(logits, layout["positions"], token_ids)
        )
        return inputs, {"draft_topk": case.draft_topk}

    def _drawn(self, logits: Tensor, token_ids: Tensor, starts: list[int], verifies: list[bool]) -> dict[str, Tensor]:
        """The likeliest tokens as candidates of every draft, of which half of those that verify are now drafts."""
        case, requests = self.case, len(self.case.num_tokens)
        if case.draft_topk == 0 or case.width == 1:
            shape = (1, 1) if case.draft_topk == 0 else (requests, 0)
            nothing = torch.full(shape, torch.nan)
            return {
                "draft_topk_ids": nothing.nan_to_num(-1).int().to(self._device),
                "draft_topk_probs": nothing.to(self._device),
            }
        best = logits.float().cpu().view(requests, case.width, -1)[:, :-1].topk(case.draft_topk, dim=2).indices
        draft_topk_probs = torch.rand(best.shape, generator=self._random).softmax(dim=2)
        for r, start in enumerate(starts):
            for j in range(case.width - 1):
                if verifies[r] and torch.rand((), generator=self._random) < 0.5:
                    place = int(torch.randint(case.draft_topk, (), generator=self._random))
                    token_ids[start + j + 1] = best[r, j, place]
        columns = {"draft_topk_ids": best.int(), "draft_topk_probs": draft_topk_probs}
        return {name: values.flatten(1).contiguous().to(self._device) for name, values in columns.items()}

    def _rules(self, logits: Tensor, positions: Tensor, token_ids: Tensor) -> dict[str, Tensor]:
        """Rules of three requests in four, in slots from the last one on; masks of every third row."""
        case, requests = self.case, len(self.case.num_tokens)
        slot_ids, num_rows = list(range(requests))[::-1], requests * case.width
        rules = RuleTensors.allocate(requests + 1, 64, self._device)
        masks = None
        if case.is_adjusted:
            likely = logits.float().cpu().topk(4, dim=1).indices.view(requests, -1).int()
            for request, slot in enumerate(slot_ids):
                self._write_rules(rules, request, slot, likely[request])
            owners = torch.tensor(slot_ids).repeat_interleave(torch.tensor(case.num_tokens))
            rules.tokens[owners, positions.cpu().long()] = token_ids.int().to(self._device)
            rows = np.arange(0, num_rows, 3)
            words = torch.randint(-(2**31), 2**31, (len(rows), -(-case.vocab_size // 32)), generator=self._random)
            masks = TokenMasks(rows=rows, bits=words.int().numpy())
        num_adjusted = num_rows if case.is_adjusted else 0
        of_step = mask_tensors(masks, num_rows=num_adjusted, vocab_size=case.vocab_size, device=self._device)
        named = {item.name: getattr(of, item.name) for of in (rules, of_step) for item in fields(of)}
        return named | {"slot_ids": torch.tensor(slot_ids, device=self._device)}

    def _write_rules(self, rules: RuleTensors, request: int, slot: int, likely: Tensor) -> None:
        """Of a text of likely tokens; half of the biases are over, or have a prefix that is not there."""

        def chosen(size: int) -> Tensor:
            return likely[torch.randint(len(likely), (size,), generator=self._random)]

        biases = (0, 0, 40, 8)[request % 4]
        rules.has_rules[slot] = int(request % 4 != 1)
        rules.num_prompt_tokens[slot] = 6
        rules.num_biases[slot] = biases
        rules.penalties[slot] = torch.tensor(
            ((1.7, 0.4, 0.3), (1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 3.0, 2.0))[request % 4]
        )
        rules.bias_tokens[slot, :biases] = chosen(biases)
        rules.bias_values[slot, :biases] = 4 * torch.randn(biases, generator=self._random) - 4
        rules.bias_ends[slot, :biases] = torch.tensor(([99, 4] * biases)[:biases], dtype=torch.int32)
        rules.prefixes[slot] = ANY_TOKEN
        rules.prefixes[slot, 0:biases:3, -1] = self.case.vocab_size
        rules.tokens[slot] = chosen(64)

    def score_rows(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """All rows of logits but the last, in another order, then one that is not read; of one row nothing else."""
        case = self.case
        num_rows = len(case.num_tokens) * case.width
        rows = torch.randperm(num_rows - 1, generator=self._random)
        return {
            "logits": self._floats(num_rows, case.vocab_size) * 3,
            "scored_rows": torch.cat((rows, torch.tensor([1 << 40]))).to(self._device),
            "scored_tokens": torch.randint(case.vocab_size, (num_rows,), generator=self._random).to(self._device),
        }, {"num_top": 20}

    def draft_tokens(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """`width` rows of each request; of a draft vocabulary in the cases of a window. One request uses rejection."""
        case, has_map = self.case, int(self.case.window > 0)
        sampling = self._sampling()
        targets = torch.randperm(2 * case.vocab_size, generator=self._random)[: case.vocab_size].sort().values
        return {
            "logits": self._floats(len(case.num_tokens) * case.width, case.vocab_size) * 3,
            "temperature": sampling["temperature"],
            "seed": sampling["seed"],
            "draft_stream": sampling["draft_stream"],
            "next_context_lens": self._next(),
            "draft_to_target": (targets if has_map else targets[:1]).to(self._device),
        }, {"has_map": has_map, "draft_topk": max(case.draft_topk, 1)}

    def _sampling(self) -> dict[str, Tensor]:
        """A greedy request, and two of two temperatures, in turn; the last uses rejection sampling."""
        requests = len(self.case.num_tokens)
        draft_topk_ids = {
            "temperature": ((0.0, 0.8, 1.3), torch.float32),
            "top_k": ((0, 40, 5), torch.int32),
            "top_p": ((1.0, 0.9, 0.95), torch.float32),
            "min_p": ((0.0, 0.02, 0.0), torch.float32),
            "seed": ((3, 2**40 + 5, 2**35 + 1), torch.int64),
            "draft_stream": ((0, 0, 1), torch.int32),
        }
        inputs = {name: tensor.to(self._device) for name, tensor in columns_off(requests).items()}
        return inputs | {
            name: torch.tensor([values[r % 3] for r in range(requests)], dtype=dtype, device=self._device)
            for name, (values, dtype) in draft_topk_ids.items()
        }

    def _layout(self) -> dict[str, Tensor]:
        case = self.case
        offsets = [sum(case.num_tokens[:r]) for r in range(len(case.num_tokens) + 1)]
        positions = [start + i for start, n in zip(case.context_lens, case.num_tokens, strict=True) for i in range(n)]
        order = torch.randperm(self._num_pages, generator=self._random)[: self._num_pages - 3]
        table = order.view(len(case.num_tokens), self._pages_per_request).int().to(self._device)
        return {"positions": self._integers(positions), "token_offsets": self._integers(offsets), "page_table": table}

    def _sinks(self) -> Tensor:  # float32 [heads]
        """NaN where they must not be read."""
        sinks = 1.0 + torch.randn(self.case.heads, generator=self._random)
        return sinks.mul(1.0 if self.case.has_sinks else torch.nan).to(self._device)

    def _next(self) -> Tensor:
        """After acceptance: the context and one row at least, all rows at most."""
        case = self.case
        given = zip(case.context_lens, case.num_tokens, strict=True)
        return self._integers([start + int(torch.randint(1, n + 1, (), generator=self._random)) for start, n in given])

    def _pools(self, pages: Tensor | None = None) -> Tensor:  # int64 [states]
        """Addresses of `pages`, K/V's by default, and of nothing before and after it."""
        self.pages = self._pages() if pages is None else pages
        pools = torch.zeros(NUM_STATES, dtype=torch.int64, device=self._device)
        pools[STATE] = self.pages.data_ptr()
        return pools

    def _page_fields(self) -> dict[str, float]:
        case = self.case
        return {
            "state": STATE,
            "page_type": int(case.page_dtype is not None),
            "page_size": case.page_size,
        } | case.scales

    def _pages(self) -> Tensor:
        case = self.case
        pages = self._floats(self._num_pages, 2, case.page_size, case.kv_heads, case.head_dim)
        if case.page_dtype is None:
            return pages
        scales = torch.tensor([case.k_scale, case.v_scale], device=self._device).view(1, 2, 1, 1, 1)
        return (pages.float() / scales).clamp(-448, 448).to(case.page_dtype)

    def _floats(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._random).to(self.case.dtype).to(self._device)

    def _integers(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)
