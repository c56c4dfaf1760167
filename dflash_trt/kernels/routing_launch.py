"""Launches of the kernel of `routing.py`. Allocates outputs; nothing depends on a tensor's content."""

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from dflash_trt.kernels.launch_rules import MAX_TILE_TOKENS, MID_TILE_TOKENS, MIN_TILE_TOKENS, max_tiles, tile_tokens
from dflash_trt.kernels.launching import FLOATS, check, check_tensor, next_power_of_2
from dflash_trt.kernels.routing import SIGMOID_TOP_K, SOFTMAX_TOP_K, TOP_K_SOFTMAX, routing_kernel

RouterKind = Literal["softmax_top_k", "top_k_softmax", "sigmoid_top_k"]
KINDS: Final = {"softmax_top_k": SOFTMAX_TOP_K, "top_k_softmax": TOP_K_SOFTMAX, "sigmoid_top_k": SIGMOID_TOP_K}
TOKEN_TILES: Final = (MIN_TILE_TOKENS, MID_TILE_TOKENS, MAX_TILE_TOKENS)
FIXED_TOKENS: Final = MIN_TILE_TOKENS  # in place of `tile_tokens`: verify blocks have few rows of an expert
MAX_EXPERTS: Final = 1024
_MAX_SCORES: Final = 4096  # per program
_MAX_ROWS: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    """The decision of one layer's router.

    "softmax_top_k": softmax over all experts, then the top k, divided by their sum if `normalizes`. "top_k_softmax":
    softmax over the top k logits. "sigmoid_top_k": the top k of sigmoid(logit) + `choice_bias`, weighted by the
    sigmoids, which are divided by their sum if `normalizes`. Weights are multiplied by `factor`, except for
    "top_k_softmax". With `num_groups` groups of adjacent experts, only the `num_chosen_groups` with the largest sums of
    their two best scores are chosen from. `num_here` experts from `first_expert` on are computed here.
    """

    kind: RouterKind
    num_chosen: int
    normalizes: bool = False
    factor: float = 1.0
    first_expert: int = 0
    num_here: int | None = None  # experts of this rank; None means all
    choice_bias: Tensor | None = None  # float32 [num_experts]
    num_groups: int = 1
    num_chosen_groups: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Entries sorted by expert and cut into tiles of `tokens`; see `routing.py`."""

    expert_ids: Tensor  # int32 [N, num_chosen]
    weights: Tensor  # float32 [N, num_chosen]
    order: Tensor  # int32 [N * num_chosen]
    tiles: Tensor  # int32 [3, num_tiles]
    tokens: int
    router: Router

    @property
    def num_tiles(self) -> int:
        return self.tiles.shape[1]

    @property
    def num_chosen(self) -> int:
        return self.expert_ids.shape[1]


def new_ticket(device: torch.device) -> Tensor:
    """Shared by all launches of one stream."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def tile_edges(num_chosen: int, num_experts: int) -> tuple[int, ...]:
    """Numbers of rows after which `tile_tokens` is larger."""
    return tuple(tile * num_experts // num_chosen for tile in (MIN_TILE_TOKENS, MID_TILE_TOKENS))


def route(
    logits: Tensor,  # F [N, num_experts]
    router: Router,
    ticket: Tensor,  # int32 [1]
    *,
    has_fixed_tiles: bool = False,  # then a row's bits depend on the row alone, whatever N is
    widens_weights: bool = False,  # of the products that follow: see `experts_launch.widens_weights`
) -> Routing:
    """Choose and sort. NaN logits are below every number, so that each row has `num_chosen` experts."""
    num_rows, num_experts = logits.shape
    _check(logits, router)
    num_entries = num_rows * router.num_chosen
    usual = tile_tokens(num_entries=num_entries, num_experts=num_experts, widens_weights=int(widens_weights))
    tokens = FIXED_TOKENS if has_fixed_tiles else usual
    experts = next_power_of_2(num_experts)
    rows = max(1, min(_MAX_ROWS, _MAX_SCORES // experts))
    num_programs = -(-num_rows // rows)
    num_here = num_experts if router.num_here is None else router.num_here
    num_tiles = max_tiles(num_entries=num_entries, num_experts=num_here, tokens=tokens)

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    routing = Routing(
        expert_ids=new(num_rows, router.num_chosen),
        weights=new(num_rows, router.num_chosen, dtype=torch.float32),
        order=new(num_rows * router.num_chosen),
        tiles=new(3, num_tiles),
        tokens=tokens,
        router=router,
    )
    routing_kernel[(num_programs,)](
        logits,
        ticket if router.choice_bias is None else router.choice_bias,
        routing.expert_ids,
        routing.weights,
        routing.order,
        routing.tiles,
        new(num_rows, router.num_chosen),
        new(num_programs + 1, experts),
        ticket,
        num_rows,
        num_tiles,
        router.first_expert,
        num_here,
        router.factor,
        **routing_constants(router, num_experts=num_experts, tokens=tokens),
        num_warps=routing_warps(router),
        enable_fp_fusion=True,
    )
    return routing


def routing_warps(router: Router) -> int:
    """So many that no register of a choice of more experts spills."""
    return 4 if router.num_chosen <= 4 else 8


def routing_constants(router: Router, *, num_experts: int, tokens: int) -> dict[str, int | bool]:
    experts = next_power_of_2(num_experts)
    return {
        "num_experts": num_experts,
        "num_chosen": router.num_chosen,
        "KIND": KINDS[router.kind],
        "NORMALIZES": router.normalizes,
        "HAS_BIAS": router.choice_bias is not None,
        "num_groups": router.num_groups,
        "num_chosen_groups": router.num_chosen_groups,
        "EXPERTS": experts,
        "GROUPS": next_power_of_2(router.num_groups),
        "CHOSEN": next_power_of_2(router.num_chosen),
        "ROWS": max(1, min(_MAX_ROWS, _MAX_SCORES // experts)),
        "PROGRAMS": max(1, _MAX_SCORES // experts),
        "TILES": max(1, _MAX_SCORES // experts),
        "ENTRIES": 1024,
        "TOKENS": tokens,
    }


def _check(logits: Tensor, router: Router) -> None:
    num_rows, num_experts = logits.shape
    check_tensor("logits", logits, dtype=FLOATS, shape=[num_rows, num_experts])
    if router.choice_bias is not None:
        check_tensor("choice_bias", router.choice_bias, dtype=torch.float32, shape=[num_experts])
    check(
        0 < router.num_chosen <= num_experts <= MAX_EXPERTS,
        "experts of a layer",
        expected=f"at most {MAX_EXPERTS}, and as many as a token goes through",
        found=f"{num_experts}, {router.num_chosen} for each token",
        hint='Run this engine with device "cpu".',
    )
