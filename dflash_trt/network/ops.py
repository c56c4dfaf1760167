"""The op façade: everything the network is made of, and nothing a back end could not lower.

`T` is a back end's tensor handle (a torch.Tensor, a TensorRT ITensor). A back end implements `Ops[T]`; `decoder`,
`drafter` and `step` call it and never look inside a handle. Shapes use the letters of `core/step_spec.py`; N is any
row count, H hidden size, D head_dim, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from dflash_trt.core.model_spec import AttentionSpec, DraftSpec, MoeSpec, Rotary
from dflash_trt.core.state_spec import PagedKv
from dflash_trt.formats.base import PackedWeight

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear(Generic[T]):
    """y = x @ weight.T + bias; weight [out, in], bias [out]. A packed weight also says how x is quantized."""

    weight: T | PackedWeight[T]
    bias: T | None = None
    name: str = ""  # of the canonical weight
    first_row: int = 0  # of the canonical weight, for a slice of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts(Generic[T]):
    """The MLP of a layer with E experts of F features. A back end may hold them in a form of its own."""

    router: Linear[T]  # [E, H]


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedExperts(Experts[T]):
    """As an engine stores them; gate_up has gate rows above up rows."""

    gate_up: T  # [E, 2F, H]
    down: T  # [E, H, F]
    gate_up_bias: T | None = None  # [E, 2F]
    down_bias: T | None = None  # [E, H]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs(Generic[T]):
    """The input tensors of `core/step_spec.STEP_INPUTS`, same names, same order."""

    token_ids: T
    positions: T
    token_offsets: T
    context_lens: T
    page_table: T
    logit_rows: T
    num_candidates: T
    temperature: T
    top_k: T
    top_p: T
    min_p: T
    seed: T


@dataclass(frozen=True, slots=True)
class Cache(Generic[T]):
    """One state of the engine, updated in place: [pages, *spec.page_shape(page_size)]."""

    tensor: T
    spec: PagedKv


@dataclass(frozen=True, kw_only=True, slots=True)
class StepState(Generic[T]):
    """K/V pages per layer."""

    target_kv: Sequence[Cache[T]]
    draft_kv: Sequence[Cache[T]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance(Generic[T]):
    """What verification decided; shapes as in `core/step_spec.STEP_OUTPUTS`, bonus_tokens int32 [R]."""

    emitted_tokens: T
    emitted_logprobs: T
    num_accepted: T
    bonus_tokens: T
    next_context_lens: T


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftBlock(Generic[T]):
    """Input of the drafter, R blocks of S = K+1 slots: [bonus, MASK x K] from the next anchor's position on."""

    token_ids: T  # int32 [R*S]
    positions: T  # int32 [R*S]


class Ops(Protocol[T]):
    """What a back end must provide. Attention ops are each the only writer of the state they are given."""

    def embedding(self, table: T, token_ids: T) -> T:
        """[V, H], int32 [N] -> [N, H]."""
        ...

    def linear(self, x: T, linear: Linear[T]) -> T:
        """[N, in] -> [N, out]."""
        ...

    def rms_norm(self, x: T, weight: T, eps: float) -> T:
        """Over the last axis, fp32 inside, back to x's dtype."""
        ...

    def add(self, a: T, b: T) -> T: ...

    def scale(self, x: T, factor: float) -> T: ...

    def silu_mul(self, gate_up: T) -> T:
        """[N, 2F] -> silu(first half) * second half, [N, F]."""
        ...

    def moe(self, x: T, experts: Experts[T], moe: MoeSpec) -> T:
        """[N, H] -> [N, H]: each row through its chosen experts, whose results are summed as the router weighs them.

        What a row gets does not depend on the other rows, beyond the rounding of a GEMM of another height.
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

    def gather_rows(self, x: T, rows: T) -> T:
        """[N, H], int32 [R, S] -> [R*S, H]."""
        ...

    def rope_table(self, rotary: Rotary, positions: T) -> Any:
        """Cosines and sines of this RoPE for these rows, made once per step; opaque to the network."""
        ...

    def rope(self, x: T, table: Any) -> T:
        """Rotate-half rotary embedding of [N, heads, D]."""
        ...

    def attend_pages(self, q: T, k: T, v: T, cache: Cache[T], attention: AttentionSpec, sinks: T | None) -> T:
        """Write k, v [T, kv_heads, D] at each token's position, then attend q [T, heads, D] over its request's pages.

        Scale is D ** -0.5. `sinks` [heads] are logits in the softmax's denominator that have no value. Returns
        [T, heads * D]. Rows are the step's tokens; page table and offsets are the step's.
        """
        ...

    def draft_context(self, kv: T, spec: DraftSpec, k_norms: Sequence[T | None], rope: Any) -> Sequence[Any]:
        """[T, layers * 2 * kv_heads * D], which is k of layer 0, v of layer 0, k of layer 1, ... -> one per layer.

        Keys are normed where there is a norm, and rotated. What is in one is for `attend_draft` to know; see
        `drafter.context_of_layers`.
        """
        ...

    def attend_draft(
        self,
        context: Any,  # one of `draft_context`; a step takes them in the order of the layers
        q: T,  # [R*S, heads, D]
        block: tuple[T, T],  # k, v of the block slots, [R*S, kv_heads, D]
        cache: Cache[T],
        acceptance: Acceptance[T],
        attention: AttentionSpec,
    ) -> T:
        """Write the context rows at positions < next_context_lens, then attend the block over pages and itself.

        The block's K/V live for this call only. Returns [R*S, heads * D].
        """
        ...

    def write_draft_context(self, context: Any, cache: Cache[T], acceptance: Acceptance[T]) -> None:
        """The write of `attend_draft` without a block: what a step with K = 0 does to stay able to draft."""
        ...

    def sample_and_accept(self, logits: T) -> Acceptance[T]:
        """[R*(K+1), V] at logit_rows -> the target's own tokens, compared with the candidates.

        The candidate after row j is the step's token at logit_rows[j] + 1, for j < num_candidates.
        """
        ...

    def draft_block(self, acceptance: Acceptance[T], *, mask_token_id: int) -> DraftBlock[T]: ...

    def draft_slots(self, hidden: T) -> T:
        """Drop slot 0 of each block: [R*(K+1), H] -> [R*K, H]."""
        ...

    def argmax_tokens(self, logits: T) -> T:
        """[R*K, V] -> int32 [R, K]."""
        ...

    def map_tokens(self, draft_to_target: T, token_ids: T) -> T:
        """Draft vocabulary ids -> target vocabulary ids, elementwise."""
        ...

    def all_reduce(self, x: T) -> T:
        """Sum over the tensor-parallel ranks; x itself on one rank."""
        ...

    def all_gather_vocab(self, logits: T) -> T:
        """Concatenate vocabulary shards along the last axis; logits itself on one rank."""
        ...
