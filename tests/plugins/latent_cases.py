"""Inputs of `AttendLatents` nodes, the kernels that a library needs for them, and what a node computes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_trt.backends.tensorrt.plugins import ATTEND_LATENTS
from dflash_trt.core.dtype import FloatDType
from dflash_trt.formats.fp8 import e4m3
from plugins.aot.latent_variants import LatentKernels
from tests.trt.networks import view_at

LATENT_DIM, ROPE_DIM = 24, 8
PAGE_SIZE, NUM_PAGES, PAGES_PER_REQUEST = 4, 40, 12
STATE = 3  # in state_pools, behind three of other layers
FP8_SCALE = 0.02


@dataclass(frozen=True, kw_only=True)
class LatentCase:
    """A step: rows and committed tokens of each request."""

    num_rows: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_heads: int = 4
    has_fp8_pages: bool = False
    num_padding: int = 0  # rows of no request at the end

    def kernels(self, dtype: FloatDType) -> LatentKernels:
        return LatentKernels(
            latent_dim=LATENT_DIM,
            rope_dim=ROPE_DIM,
            page_dtype="float8_e4m3fn" if self.has_fp8_pages else dtype,
            page_size=PAGE_SIZE,
            max_requests=16,
        )

    def node(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> tuple[dict[str, Tensor], dict[str, float], Tensor]:
        """Named inputs, fields and the pages, all new."""
        random = torch.Generator().manual_seed(11)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random)

        row_size, page_dtype = LATENT_DIM + ROPE_DIM, torch.float8_e4m3fn if self.has_fp8_pages else dtype
        scale = FP8_SCALE if self.has_fp8_pages else 1.0
        stored = randn(NUM_PAGES, PAGE_SIZE, row_size)
        pages = (e4m3(stored / scale) if self.has_fp8_pages else stored.to(page_dtype)).to(device)
        pools = torch.zeros(STATE + 2, dtype=torch.int64)
        pools[STATE] = pages.data_ptr()
        num_rows, offsets, positions = sum(self.num_rows) + self.num_padding, [0], list[int]()
        for count, context in zip(self.num_rows, self.context_lens, strict=True):
            offsets.append(offsets[-1] + count)
            positions += range(context, context + count)
        order = torch.randperm(NUM_PAGES, generator=random)[: len(self.num_rows) * PAGES_PER_REQUEST]
        inputs = {
            "q": randn(num_rows, self.num_heads, row_size).to(dtype),
            "own": randn(num_rows, row_size).to(dtype),
            "state_pools": pools,
            "positions": torch.tensor([*positions, *[0] * self.num_padding], dtype=torch.int32),
            "token_offsets": torch.tensor(offsets, dtype=torch.int32),
            "context_lens": torch.tensor(self.context_lens, dtype=torch.int32),
            "page_table": order.int().view(len(self.num_rows), PAGES_PER_REQUEST),
        }
        fields = {"state": STATE, "page_type": int(self.has_fp8_pages), "page_size": PAGE_SIZE}
        reals = {"latent_dim": LATENT_DIM, "k_scale": scale, "score_scale": 0.2}
        return {name: inputs[name].to(device) for name in ATTEND_LATENTS.inputs}, fields | reals, pages


CASES = {
    "verify blocks": LatentCase(num_rows=(3, 1, 4), context_lens=(9, 0, 22)),
    "a long context beside a prompt": LatentCase(num_rows=(2, 19), context_lens=(44, 3)),
    "FP8 pages": LatentCase(num_rows=(2, 5), context_lens=(30, 0), has_fp8_pages=True),
    "groups of heads, in a padded step": LatentCase(
        num_rows=(2, 3, 0), context_lens=(40, 5, 0), num_heads=40, num_padding=3
    ),
}


def run_reference(x: dict[str, Tensor], settings: dict[str, float]) -> list[Tensor]:
    """plugins/README.md in PyTorch; rows of no request, which a node leaves alone, are zeros."""
    page_size, latent_dim, is_fp8 = int(settings["page_size"]), int(settings["latent_dim"]), bool(settings["page_type"])
    q, own = x["q"], x["own"]
    shape = (int(x["page_table"].max()) + 1, page_size, own.shape[1])
    pages = view_at(int(x["state_pools"][int(settings["state"])]), shape, torch.uint8 if is_fp8 else own.dtype)
    codes = e4m3(own.float() / settings["k_scale"]).view(torch.uint8) if is_fp8 else own
    attended = torch.zeros(*q.shape[:2], latent_dim, dtype=q.dtype)
    for r, context in enumerate(x["context_lens"].tolist()):
        start, stop = x["token_offsets"][r : r + 2].tolist()
        for t in range(start, stop):
            position = int(x["positions"][t])
            pages[int(x["page_table"][r, position // page_size]), position % page_size] = codes[t]
        num_keys, num_pages = context + stop - start, -(-(context + stop - start) // page_size)
        stored = pages[x["page_table"][r, :num_pages].long()].flatten(0, 1)[:num_keys]
        keys = (stored.view(torch.float8_e4m3fn) if is_fp8 else stored).float() * settings["k_scale"]
        scores = torch.einsum("qhd,kd->qhk", q[start:stop].float(), keys) * settings["score_scale"]
        is_hidden = torch.arange(num_keys) > x["positions"][start:stop, None, None]
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(2)
        attended[start:stop] = (weights @ keys[:, :latent_dim]).to(q.dtype)
    return [attended]
