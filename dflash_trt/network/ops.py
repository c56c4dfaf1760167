"""The op façade: everything the network is made of, and nothing a backend could not lower.

`T` is a backend's tensor handle (a torch.Tensor, a TensorRT ITensor). A backend implements `Ops[T]`; mixers, drafters
and the step call it and never look inside a handle. Shapes use the letters of `core/step_spec.py`; N is any row
count, H hidden size, D head_dim, V vocabulary, S = K + 1 the slots of a draft block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.core.model.gqa import Gqa, QueryTemperature
from dflash_trt.core.model.mla import Mla
from dflash_trt.core.model.rope import Rotary
from dflash_trt.core.sampling import SamplingColumns
from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.state import Cache, LatentCache, RecurrentCache, RowCache

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear(Generic[T]):
    """y = x @ weight.T + bias; weight [out, in], bias [out].

    A quantized weight also says how to quantize x. The linear of a layer's experts has [E, out, in] and [E, out].
    """

    weight: T | QuantizedWeight[T]
    bias: T | None = None
    name: str = ""  # the canonical weight's
    first_row: int = 0  # in the canonical weight, for a slice of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts(Generic[T]):
    """The MLP of a layer with experts of F features. A backend may hold them in a form of its own.

    A rank holds `num_experts` of the router's experts, from `first_expert` on.
    """

    router: Linear[T]
    num_experts: int
    first_expert: int = 0
    choice_bias: T | None = None  # float32 [experts of the router]
    expert_scales: T | None = None  # [E], of all experts


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedExperts(Experts[T]):
    """Experts as an engine stores them: linear layers with a leading axis of experts.

    gate_up [E, 2F, H] has gate rows above up rows, down is [E, H, F].
    """

    gate_up: Linear[T]
    down: Linear[T]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs(SamplingColumns[T]):
    """The input tensors of `core/step_spec.STEP_INPUTS`, same names; sampling columns are inherited."""

    token_ids: T
    positions: T
    token_offsets: T
    context_lens: T
    page_table: T
    logit_rows: T
    num_candidates: T
    draft_topk_ids: T | None = None  # None in steps without drafts to verify by rejection sampling
    draft_topk_probs: T | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaParameters(Generic[T]):
    """Gated delta net of hv value heads: parameters besides projections. It decays at rates e^log_rate."""

    conv: T  # [channels, conv_size]
    log_rate: T  # float32 [hv]
    dt_bias: T  # float32 [hv]
    norm: T  # [value_head_dim]


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance(Generic[T]):
    """Result of verification; shapes as in `core/step_spec.STEP_OUTPUTS`, bonus_tokens int32 [R]."""

    emitted_tokens: T
    emitted_logprobs: T
    num_accepted: T
    bonus_tokens: T
    next_context_lens: T


class ExchangedRows(NamedTuple):
    """Rows of a call that all ranks compute together, where they have requests of their own: each rank's number.

    They are the step's tokens, or so many for each request, or those of a part of `LogitsReader.prompt_parts`.
    """

    per_request: int = 0
    prompt_part: int | None = None


OF_TOKENS: Final = ExchangedRows()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows(Generic[T]):
    """Rows of tokens [N] that a mixer runs over, and the requests they belong to.

    `token_offsets` None means equally many rows for every request. `keeps_kv`: K/V of the rows are state, written to
    the pages at `positions`; otherwise the rows follow the first `context_lens` positions of the pages and their K/V
    live for one call only. `index` is derived from the others by the backend, opaque to the network.
    """

    positions: T  # int32 [N]
    token_offsets: T | None  # int32 [R+1]
    context_lens: T  # int32 [R], positions in the pages before a request's first row
    page_table: T  # int32 [G*R, P]; on a GPU [G, R, P]
    keeps_kv: bool
    index: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBlocks(Generic[T]):
    """R blocks of S tokens, from the position after the accepted tokens on."""

    token_ids: T  # int32 [R*S]
    rows: Rows[T]


@dataclass(frozen=True, kw_only=True, slots=True)
class Codebooks(Generic[T]):
    """Scores of token b after token a at hidden state h [r]: the sum of predecessor[a] * h * successor[b].

    A slot chooses among its `top_k` most likely tokens.
    """

    predecessor: T  # [V, r]
    successor: T  # [V, r]
    top_k: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KvDestination(Generic[T]):
    """Destination of a layer's K and V, and the preparation of K: normed if there is a norm, and rotated."""

    cache: Cache[T]
    k_norm: T | None
    eps: float
    rope: Any  # from `Ops.rope_table`


class Ops(Protocol[T]):
    """Ops that a backend implements. In one step, at most one op writes to a state."""

    def token_rows(self) -> Rows[T]:
        """The step's own T tokens, whose K/V are kept."""
        ...

    def embedding(self, table: T, token_ids: T, scale: float = 1.0) -> T:
        """[V, H], int32 [N] -> [N, H], multiplied by `scale` rounded to the table's dtype, like transformers.

        Where ranks have requests of their own, the table is this rank's part, and other tokens have zeros.
        """
        ...

    def linear(self, x: T, linear: Linear[T]) -> T:
        """[N, in] -> [N, out]."""
        ...

    def rms_norm(self, x: T, weight: T, eps: float) -> T:
        """Over the last axis, fp32 inside, back to x's dtype."""
        ...

    def unweighted_rms_norm(self, x: T, eps: float) -> T:
        """`rms_norm` without a weight."""
        ...

    def joint_rms_norm(self, x: T, weight: T, eps: float) -> T:
        """`rms_norm` of rows [N, F] whose features all ranks hold a part of."""
        ...

    def add(self, a: T, b: T) -> T: ...

    def scale(self, x: T, factor: float) -> T: ...

    def mul(self, x: T, factors: T) -> T:
        """[N, F] and [N, F] or [1]."""
        ...

    def sigmoid_mul(self, x: T, gate: T) -> T:
        """x * sigmoid(gate): [N, F], and gate [N, F] or [N, 1]."""
        ...

    def silu_mul(self, gate_up: T) -> T:
        """[N, 2F] -> silu(first half) * second half, [N, F]."""
        ...

    def gelu_mul(self, gate_up: T) -> T:
        """The same with GELU, in its approximation with tanh."""
        ...

    def softcap(self, x: T, cap: float) -> T:
        """cap * tanh(x / cap), float32 whatever x is."""
        ...

    def tanh(self, x: T) -> T: ...

    def sigmoid(self, x: T) -> T:
        """float32 whatever x is."""
        ...

    def moe(self, x: T, experts: Experts[T], moe: Moe, routed: T | None = None) -> T:
        """[N, H] -> [N, H]: each row through its chosen experts, whose results are summed by router weight.

        The router reads `routed` [N, H] instead of x, if given. A row's result does not depend on the other rows,
        except for the rounding of a GEMM of another height.
        """
        ...

    def exchanged_moe(
        self, x: T, experts: Experts[T], moe: Moe, exchanged: ExchangedRows, routed: T | None = None
    ) -> T:
        """`moe` of this rank's rows; where ranks have requests of their own, summed over all of them.

        Rows go to the ranks that have experts of them, or to all ranks as in `all_gather_rows`.
        """
        ...

    def split(self, x: T, sizes: Sequence[int]) -> Sequence[T]:
        """Along the last axis."""
        ...

    def concat(self, xs: Sequence[T]) -> T:
        """Along the last axis."""
        ...

    def split_heads(self, x: T, head_dim: int) -> T:
        """[N, heads * D] -> [N, heads, D]."""
        ...

    def merge_heads(self, x: T) -> T:
        """[N, heads, D] -> [N, heads * D]."""
        ...

    def gather_rows(self, x: T, rows: T) -> T:
        """[N, H], int32 [R] or [R, S] -> [R*S, H]; x may be a weight."""
        ...

    def rope_table(self, rotary: Rotary, positions: T) -> Any:
        """Cosines and sines of this RoPE for these rows, made once per step; opaque to the network."""
        ...

    def rope(self, x: T, table: Any) -> T:
        """Rotate-half rotary embedding of [N, heads, D]."""
        ...

    def tempered(self, q: T, rows: Rows[T], temperature: QueryTemperature) -> T:
        """Queries [N, heads, D] of these rows, scaled by their positions."""
        ...

    def attend(
        self, q: T, k: T | None, v: T | None, rows: Rows[T], cache: Cache[T], gqa: Gqa, sinks: T | None = None
    ) -> T:
        """Attend q [N, heads, D] over the pages of each row's request and the rows' k, v [N, kv_heads, D].

        Rows that keep their K/V write them first; without k and v, an earlier layer has written them. Scores are scaled
        by `gqa.score_scale`, capped by `gqa.softcap` and masked by `gqa.mask`. `sinks` [heads] are logits in the
        softmax's denominator that have no value. Returns [N, heads * D].
        """
        ...

    def pairs_to_halves(self, x: T) -> T:
        """[N, heads, D]: (0, 1), (2, 3), ... -> the firsts of all pairs, then the seconds."""
        ...

    def attend_latent(
        self, q_nope: T, q_rope: T, latents: T, k_rope: T, kv_b: T, rows: Rows[T], cache: LatentCache[T], mla: Mla
    ) -> T:
        """Attend q [N, heads, nope_dim] and [N, heads, rope_dim] over latents: see `core/model/mla.py`.

        The rows' own `latents` [N, latent_dim] and k_rope [N, 1, rope_dim] are written to their pages first. `kv_b` has
        this rank's factors, [heads * (nope_dim + v_head_dim), latent_dim]. Returns [N, heads * v_head_dim].
        """
        ...

    def gated_delta(
        self,
        qkvz: T,
        ba: T,
        parameters: DeltaParameters[T],
        rows: Rows[T],
        cache: RecurrentCache[T],
        spec: GatedDelta,
        eps: float,
    ) -> T:
        """Convolution, recurrence, norm and output gate of `core/model/gated_delta.py`.

        [N, channels + v_size] and [N, 2 * value_heads] -> [N, v_size], the sum over rows of a request in their order,
        from the state of its slot. Folds the records that were accepted since the last step, and leaves new ones.
        """
        ...

    def store_kv(self, kv: T, layers: Sequence[KvDestination[T]], rows: Rows[T], limits: T) -> None:
        """Write K and V that one GEMM made for several layers, [N, k_0 | v_0 | k_1 | ...], kv_heads * D each.

        Rows at positions >= limits [R] of their request leave the pages alone.
        """
        ...

    def sample_and_accept(self, logits: T) -> Acceptance[T]:
        """[R*(K+1), V] at logit_rows -> the target's own tokens, compared with the candidates.

        The candidate after row j is the step's token at logit_rows[j] + 1, for j < num_candidates. With
        rejection sampling it is the row's token if it is accepted (`backends/torch/rejection.py`).
        """
        ...

    def token_blocks(self, acceptance: Acceptance[T], *, fill: int, drafts_from_anchor: bool = False) -> TokenBlocks[T]:
        """A block [bonus token, fill x K] after the accepted tokens of every request; its K/V are not kept.

        With `drafts_from_anchor` it is [bonus token, fill x (K - 1)].
        """
        ...

    def chain_blocks(self, acceptance: Acceptance[T], drafts: Sequence[T]) -> TokenBlocks[T]:
        """As `token_blocks`, a block [bonus token, *drafts]: int32 [R, 1] each."""
        ...

    def previous_rows(self, x: T, rows: Rows[T], cache: RowCache[T]) -> T:
        """The row of x [T, H] at the previous position, for the step's own tokens; zeros at position 0.

        The rows of x are stored at their positions in the pages, for a request's first row of a later step.
        """
        ...

    def context_rows(self, cache: RowCache[T], acceptance: Acceptance[T]) -> T:
        """The rows [R, H] that the pages have at the last positions before the bonus tokens."""
        ...

    def stack_slots(self, slots: Sequence[T]) -> T:
        """A row per request of each slot, [R, H], as rows of blocks: [R*S, H]."""
        ...

    def last_slot(self, x: T, num_slots: int) -> T:
        """[R*S, H] -> [R, H]."""
        ...

    def slot_rows(self, x: T, slot: int) -> T:
        """The rows [R, H] of one slot of blocks [R*S, H]; where K is a number of the step, at most the last slot's."""
        ...

    def without_first(self, hidden: T) -> T:
        """Drop slot 0 of each block: [R*S, H] -> [R*K, H]."""
        ...

    def draft_tokens(
        self, logits: T, acceptance: Acceptance[T], draft_to_target: T | None, *, draft_topk: int, first_slot: int = 1
    ) -> Proposal[T]:
        """The token of every slot of the blocks from `first_slot` on, of logits [R*K, V]: ids of the target.

        The largest logit at temperature 0, else the largest with the noise that will sample the target at the slot's
        position (`backends/torch/philox.py`); with rejection sampling, a sample of the `draft_topk`
        largest. `draft_to_target` [V] are the target's ids of a draft vocabulary.
        """
        ...

    def block_conv(self, x: T, filters: T, base: T) -> T:
        """Causal convolution over the slots of each block, which starts without history: [R*S, H] -> [R*S, H].

        Channel c of slot p is the sum over j < J of (base[j, c] + filters[p, j, group of c]) * x[p - j, c]; base [1, J,
        H], filters [R*S, J * groups].
        """
        ...

    def select_tokens(self, logits: T, hidden: T, codebooks: Codebooks[T], acceptance: Acceptance[T]) -> Proposal[T]:
        """As `draft_tokens`, one slot after the other: a slot's scores depend on the previous slot's token.

        logits [R*K, V], hidden [R*K, r]. A score is a token's logit plus the codebooks' score after the previous token,
        for slot 1 the bonus token. Noise is as in `draft_tokens`, on the scores.
        """
        ...

    def all_reduce(self, x: T) -> T:
        """Sum over the tensor-parallel ranks; x itself on one rank."""
        ...

    def all_gather_vocab(self, logits: T, exchanged: ExchangedRows) -> T:
        """Concatenate vocabulary shards along the last axis; logits itself on one rank.

        Where ranks have requests of their own, of rows of `all_gather_rows`: each rank gets its own.
        """
        ...

    def all_gather_rows(self, x: T, exchanged: ExchangedRows) -> T:
        """[N, H] or [N] of this rank -> rows of all ranks that have requests of their own; x itself where none have."""
        ...

    def reduce_scatter_rows(self, x: T, exchanged: ExchangedRows) -> T:
        """Rows of `all_gather_rows`, summed over its ranks -> this rank's [N, H]."""
        ...
