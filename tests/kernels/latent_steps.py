"""Steps of latent attention over pages whose unused rows hold NaN, and what plain PyTorch makes of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.cuda.handles import Heads, Norm, RopeRows, RowsIndex
from dflash_trt.backends.cuda.latent_attention import LatentMemory, attend_device_latent, own_pieces, shape_of
from dflash_trt.backends.torch.attention_plan import plan_attention
from dflash_trt.backends.torch.latent_attention import attend_latent
from dflash_trt.backends.torch.process_group import ONE_RANK, OneRank, RankGroup
from dflash_trt.core.dtype import dtype_name
from dflash_trt.core.model.mla import Mla
from dflash_trt.core.model.rope import RopeSpec
from dflash_trt.core.quantization import LayerKvScales
from dflash_trt.core.state_spec import PagedLatent
from dflash_trt.formats.fp8 import e4m3
from dflash_trt.kernels.attention_fixed import Piece
from dflash_trt.kernels.attention_launch import num_multiprocessors
from dflash_trt.kernels.attention_plan import RequestTensors
from dflash_trt.kernels.context_parts_launch import ContextPart
from dflash_trt.kernels.latent_rules import largest_workspace
from dflash_trt.kernels.rope_and_pages_launch import Rotation
from dflash_trt.network.ops import Rows
from dflash_trt.network.rope import rope_frequencies
from dflash_trt.network.state import LatentCache
from tests.kernels.reference_rope_and_pages import rotate
from tests.kernels.test_attention_kernels import step_inputs

T = TypeVar("T")
NUM_VERIFY_ROWS = 4


def mla_of(num_heads: int = 4, **sizes: Any) -> Mla:
    """Small, and no size a power of two."""
    small: dict[str, Any] = {"latent_dim": 40, "nope_dim": 12, "rope_dim": 10, "v_head_dim": 9}
    return Mla(num_heads=num_heads, rope=RopeSpec(theta=100.0), scale=0.3, **small | sizes)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Requests with `rows` query rows each, after `contexts` stored tokens each."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    mla: Mla = field(default_factory=mla_of)
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    k_scale: float | None = None  # of FP8 pages
    num_extra_rows: int = 0  # tokens behind the last request's


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """On the CPU; `pages` have the contexts, and NaN elsewhere."""

    q_nope: Tensor
    q_rope: Tensor
    projected: Tensor  # [N, latent_dim + rope_dim], before norm and rotation
    norm: Tensor
    kv_b: Tensor
    pages: Tensor
    positions: Tensor
    requests: RequestTensors


def make_tensors(step: Step, *, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    mla, page_size, row_size = step.mla, step.page_size, step.mla.latent_dim + step.mla.rope_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(step.dtype)

    num_pages = [-(-(context + rows) // page_size) for context, rows in zip(step.contexts, step.rows, strict=True)]
    order = (torch.randperm(sum(num_pages), generator=generator) + 1).int().split(num_pages)
    page_table = torch.zeros(len(step.rows), max(num_pages) + 1, dtype=torch.int32)
    pages = torch.full((sum(num_pages) + 1, page_size, row_size), torch.nan, dtype=step.dtype)
    for request, (context, own) in enumerate(zip(step.contexts, order, strict=True)):
        page_table[request, : len(own)] = own
        for position in range(context):
            pages[own[position // page_size], position % page_size] = draw(row_size)
    offsets = torch.tensor((0, *step.rows)).cumsum(0).int()
    positions = [torch.arange(c, c + n) for c, n in zip(step.contexts, step.rows, strict=True)]
    num_rows = int(offsets[-1]) + step.num_extra_rows
    return Tensors(
        q_nope=draw(num_rows, mla.num_heads, mla.nope_dim),
        q_rope=draw(num_rows, mla.num_heads, mla.rope_dim),
        projected=draw(num_rows, row_size),
        norm=1 + draw(mla.latent_dim) / 4,
        kv_b=draw(mla.num_heads * (mla.nope_dim + mla.v_head_dim), mla.latent_dim) / mla.latent_dim**0.5,
        pages=pages if step.k_scale is None else e4m3(pages.float() / step.k_scale),
        positions=torch.cat((*positions, torch.zeros(step.num_extra_rows))).int(),
        requests=RequestTensors(
            token_offsets=offsets, context_lens=torch.tensor(step.contexts, dtype=torch.int32), page_table=page_table
        ),
    )


class _WaitsError(Exception):
    """Another rank has not come as far."""


@dataclass
class RanksInTurn(OneRank):
    """Ranks that run one after another, again and again, each time as far as the others' exchanges let them."""

    num_ranks: int  # type: ignore[misc]
    rank: int = 0  # type: ignore[misc]
    sent: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by exchange and rank
    num_calls: int = 0

    def run(self, compute: Callable[[int], T]) -> list[T]:
        """`compute(rank)` of every rank."""
        while True:
            done = list[T]()
            for rank in range(self.num_ranks):
                self.rank, self.num_calls = rank, 0
                try:
                    done.append(compute(rank))
                except _WaitsError:
                    continue
            if len(done) == self.num_ranks:
                return done

    def all_gather_rows(self, x: Tensor, num_rows: Sequence[int]) -> Tensor:
        return torch.cat(self._of_all(x))

    def all_to_all_by_counts(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return torch.cat([of_rank.split(list(sent))[self.rank] for of_rank in self._of_all(x)])

    def _of_all(self, x: Tensor) -> list[Tensor]:
        call, self.num_calls = self.num_calls, self.num_calls + 1
        self.sent[call, self.rank] = x.clone()
        if any((call, rank) not in self.sent for rank in range(self.num_ranks)):
            raise _WaitsError
        return [self.sent[call, rank] for rank in range(self.num_ranks)]


def run_ranks(step: Step, tensors: Tensors, device: torch.device, *, num_ranks: int) -> tuple[Tensor, Tensor]:
    """As `run_kernels`, over ranks that have every num_ranks-th position and a part of the heads each."""
    ranks, mla = RanksInTurn(num_ranks), step.mla
    num_heads = mla.num_heads // num_ranks

    def of_rank(rank: int) -> tuple[Tensor, Tensor]:
        heads = slice(rank * num_heads, (rank + 1) * num_heads)
        own = replace(
            tensors,
            q_nope=tensors.q_nope[:, heads],
            q_rope=tensors.q_rope[:, heads],
            kv_b=tensors.kv_b.view(mla.num_heads, -1, mla.latent_dim)[heads].flatten(0, 1),
            pages=tensors.pages[:, rank::num_ranks].contiguous(),
        )
        return run_kernels(replace(step, mla=mla.model_copy(update={"num_heads": num_heads})), own, device, ranks)

    outputs, pages = zip(*ranks.run(of_rank), strict=True)
    return torch.cat(outputs, 1), torch.stack(pages, 2).flatten(1, 2)


def cache_of(step: Step, pages: Tensor, num_parts: int = 1) -> LatentCache[Tensor]:
    scales = None if step.k_scale is None else LayerKvScales(k=step.k_scale, v=step.k_scale)
    sizes = {"latent_dim": step.mla.latent_dim, "rope_dim": step.mla.rope_dim, "num_parts": num_parts}
    return LatentCache(pages, PagedLatent(name="latents", dtype=dtype_name(pages.dtype), scales=scales, **sizes))


def run_reference(step: Step, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """What the requests' rows attend to, [N, heads * v_head_dim], and the pages behind it."""
    mla, num_rows = step.mla, sum(step.rows)
    present = [request for request, rows in enumerate(step.rows) if rows]  # the torch back end has no others
    requests = RequestTensors(
        token_offsets=torch.tensor((0, *(step.rows[request] for request in present))).cumsum(0).int(),
        context_lens=tensors.requests.context_lens[present],
        page_table=tensors.requests.page_table[present],
    )
    inputs = step_inputs(requests, [step.rows[request] for request in present])
    plan = plan_attention(inputs, page_size=step.page_size, num_draft_tokens=NUM_VERIFY_ROWS - 1)
    frequencies = rope_frequencies(mla.rotary)
    rotation = Rotation(inv_freq=torch.tensor(frequencies.inv_freq), amplitude=frequencies.amplitude)

    def turned(heads: Tensor) -> Tensor:
        heads = torch.cat((heads[..., 0::2], heads[..., 1::2]), -1) if mla.has_paired_rope else heads
        return rotate(heads, tensors.positions[:num_rows], None, rotation).to(heads.dtype)

    latents, k_rope = tensors.projected[:num_rows].split((mla.latent_dim, mla.rope_dim), -1)
    latents = F.rms_norm(latents, latents.shape[-1:], tensors.norm, mla.latent_eps)
    pages = tensors.pages.float().nan_to_num(0).to(tensors.pages.dtype)
    queries = (tensors.q_nope[:num_rows], turned(tensors.q_rope[:num_rows]))
    rotated = turned(k_rope[:, None])
    return attend_latent(plan, *queries, latents, rotated, tensors.kv_b, cache_of(step, pages), mla), pages


def run_kernels(
    step: Step, tensors: Tensors, device: torch.device, ranks: RankGroup = ONE_RANK
) -> tuple[Tensor, Tensor]:
    """The same, [N, heads * v_head_dim]; rows of no request have what memory was left with: zeros."""
    mla, pages = step.mla, tensors.pages.to(device, copy=True)
    frequencies = rope_frequencies(mla.rotary)
    inv_freq = torch.tensor(frequencies.inv_freq, device=device)
    positions = tensors.positions.to(device)
    requests = RequestTensors(
        token_offsets=tensors.requests.token_offsets.to(device),
        context_lens=tensors.requests.context_lens.to(device),
        page_table=tensors.requests.page_table.to(device),
    )
    part, own = ContextPart(ranks.rank, ranks.num_ranks), tuple[Piece, ...]()
    if part.num_ranks > 1:
        own = tuple(own_pieces(requests, positions, part, num_verify_rows=NUM_VERIFY_ROWS))
    piece = Piece(rows=slice(len(positions)), requests=requests)
    rows: Rows[Any] = Rows(
        positions=positions,
        token_offsets=requests.token_offsets,
        context_lens=requests.context_lens,
        page_table=requests.page_table,
        keeps_kv=True,
        index=(RowsIndex(requests=requests, pieces=(piece,), own_pieces=own),),
    )
    rope = RopeRows(inv_freq, frequencies.amplitude, positions)
    # Parts of projections, as the network cuts them.
    queries = torch.cat((tensors.q_nope, tensors.q_rope), -1).to(device)
    q_nope, q_rope = queries.split((mla.nope_dim, mla.rope_dim), -1)
    latents, k_rope = tensors.projected.to(device).split((mla.latent_dim, mla.rope_dim), -1)
    attending = mla.model_copy(update={"num_heads": mla.num_heads * ranks.num_ranks})
    workspace = largest_workspace(shape_of(attending), num_multiprocessors=num_multiprocessors(device))
    attended = attend_device_latent(
        (Heads(q_nope), Heads(q_rope, rope=rope, is_paired=mla.has_paired_rope)),
        (
            Norm(latents, tensors.norm.to(device), mla.latent_eps),
            Heads(k_rope[:, None], rope=rope, is_paired=mla.has_paired_rope),
        ),
        tensors.kv_b.to(device),
        rows,
        cache_of(step, pages, ranks.num_ranks),
        mla,
        LatentMemory.allocate([attending], num_rows=len(positions), dtype=step.dtype, device=device, part=part),
        torch.full((workspace,), torch.nan, device=device),
        ranks,
        num_verify_rows=NUM_VERIFY_ROWS,
    )
    return attended.cpu(), pages.cpu()
