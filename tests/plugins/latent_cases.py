"""Inputs of `AttendLatents` nodes, the kernels that a library needs for them, and what a node computes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_trt.core.dtype import FloatDType
from dflash_trt.formats.fp8 import e4m3
from dflash_trt.kernels.launch_rules import ANY_ROWS, min_direct_rows
from dflash_trt.kernels.programs import ATTEND_LATENTS
from plugins.aot.latent_variants import LatentKernels
from tests.trt.host_memory import view_at

LATENT_DIM, ROPE_DIM, NOPE_DIM, VALUE_DIM = 24, 8, 16, 12
PAGE_SIZE = 4
STATE = 3  # in state_pools, behind three of other layers
FP8_SCALE = 0.02
_FACTORS = ("k_factor", "v_factor")


@dataclass(frozen=True, kw_only=True)
class LatentCase:
    """A step: rows and committed tokens of each request."""

    num_rows: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_heads: int = 4
    has_fp8_pages: bool = False
    num_padding: int = 0  # rows of no request at the end
    max_verify_rows: int = 16
    num_multiprocessors: int = 16  # so many that long contexts are split

    @property
    def pages_per_request(self) -> int:
        """One more than the longest has."""
        lengths = (sum(both) for both in zip(self.num_rows, self.context_lens, strict=True))
        return max(lengths) // PAGE_SIZE + 2

    @property
    def direct_requests(self) -> list[int]:
        """See plugins/README.md."""
        sizes = {"num_rows": sum(self.num_rows) + self.num_padding, "num_requests": len(self.num_rows)}
        least = min_direct_rows(**sizes, num_verify_rows=self.max_verify_rows)
        both = enumerate(zip(self.num_rows, self.context_lens, strict=True))
        return [r for r, (rows, context) in both if context == 0 and rows >= least]

    def kernels(self, dtype: FloatDType) -> LatentKernels:
        return LatentKernels(
            latent_dim=LATENT_DIM,
            rope_dim=ROPE_DIM,
            nope_dim=NOPE_DIM,
            value_dim=VALUE_DIM,
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
        num_pages = len(self.num_rows) * self.pages_per_request + 4
        stored = randn(num_pages, PAGE_SIZE, row_size)
        pages = (e4m3(stored / scale) if self.has_fp8_pages else stored.to(page_dtype)).to(device)
        pools = torch.zeros(STATE + 2, dtype=torch.int64)
        pools[STATE] = pages.data_ptr()
        num_rows, offsets, positions = sum(self.num_rows) + self.num_padding, [0], list[int]()
        for count, context in zip(self.num_rows, self.context_lens, strict=True):
            offsets.append(offsets[-1] + count)
            positions += range(context, context + count)
        order = torch.randperm(num_pages, generator=random)[: len(self.num_rows) * self.pages_per_request]
        factors = [randn(self.num_heads, size, LATENT_DIM).to(dtype) / 5 for size in (NOPE_DIM, VALUE_DIM)]
        q_nope = randn(self.num_heads, num_rows, NOPE_DIM).to(dtype)
        absorbed = torch.einsum("hqd,hdr->qhr", q_nope.float(), factors[0].float())
        inputs = {
            "q": torch.cat((absorbed, randn(num_rows, self.num_heads, ROPE_DIM)), 2).to(dtype),
            "own": randn(num_rows, row_size).to(dtype),
            "q_nope": q_nope,
            "k_factor": factors[0],
            "v_factor": factors[1],
            "state_pools": pools,
            "positions": torch.tensor([*positions, *[0] * self.num_padding], dtype=torch.int32),
            "token_offsets": torch.tensor(offsets, dtype=torch.int32),
            "context_lens": torch.tensor(self.context_lens, dtype=torch.int32),
            "page_table": order.int().view(len(self.num_rows), -1),
        }
        fields = {"state": STATE, "page_type": int(self.has_fp8_pages), "page_size": PAGE_SIZE}
        fields |= {"latent_dim": LATENT_DIM, "max_verify_rows": self.max_verify_rows}
        reals = {"k_scale": scale, "score_scale": 0.2}
        return {name: inputs[name].to(device) for name in ATTEND_LATENTS.input_names}, fields | reals, pages


CASES = {
    "verify blocks": LatentCase(num_rows=(3, 1, 4), context_lens=(9, 0, 22)),
    "a long context beside a prompt": LatentCase(num_rows=(2, 19), context_lens=(44, 3)),
    "FP8 pages": LatentCase(num_rows=(2, 5), context_lens=(30, 0), has_fp8_pages=True),
    "groups of heads, in a padded step": LatentCase(
        num_rows=(2, 3, 0), context_lens=(40, 5, 0), num_heads=40, num_padding=3
    ),
    "a prompt that begins beside a verify block, a later chunk and a shorter prompt, in a padded step": LatentCase(
        num_rows=(3, 66, 65, 63), context_lens=(22, 0, 7, 0), num_heads=2, num_padding=2
    ),
    "a prompt that begins over FP8 pages, whose absorbed keys would be split": LatentCase(
        num_rows=(2, 64), context_lens=(9, 0), num_heads=2, has_fp8_pages=True, num_multiprocessors=32
    ),
    "no more rows than verify blocks may have": LatentCase(
        num_rows=(65, 1), context_lens=(0, 3), num_heads=1, max_verify_rows=33
    ),
}


def run_reference(x: dict[str, Tensor], settings: dict[str, float], *, is_in_splits: bool = False) -> list[Tensor]:
    """plugins/README.md in PyTorch; sums of rows of no request, which a node leaves alone, are zeros.

    In splits all rows are absorbed, and each is a call whose shape its own position decides.
    """
    page_size, latent_dim, is_fp8 = int(settings["page_size"]), int(settings["latent_dim"]), bool(settings["page_type"])
    q, own = x["q"], x["own"]
    shape = (int(x["page_table"].max()) + 1, page_size, own.shape[1])
    pages = view_at(int(x["state_pools"][int(settings["state"])]), shape, torch.uint8 if is_fp8 else own.dtype)
    codes = e4m3(own.float() / settings["k_scale"]).view(torch.uint8) if is_fp8 else own
    attended = torch.zeros(*q.shape[:2], latent_dim, dtype=q.dtype)
    direct = torch.zeros(*q.shape[:2], x["v_factor"].shape[1], dtype=q.dtype)
    sizes = {"num_rows": len(q), "num_requests": len(x["context_lens"])}
    least = ANY_ROWS if is_in_splits else min_direct_rows(**sizes, num_verify_rows=int(settings["max_verify_rows"]))
    for r, context in enumerate(x["context_lens"].tolist()):
        start, stop = x["token_offsets"][r : r + 2].tolist()
        for t in range(start, stop):
            position = int(x["positions"][t])
            pages[int(x["page_table"][r, position // page_size]), position % page_size] = codes[t]
        num_keys, num_pages = context + stop - start, -(-(context + stop - start) // page_size)
        stored = pages[x["page_table"][r, :num_pages].long()].flatten(0, 1)[:num_keys]
        keys = (stored.view(torch.float8_e4m3fn) if is_fp8 else stored).float() * settings["k_scale"]
        is_hidden = torch.arange(num_keys) > x["positions"][start:stop, None, None]
        own_q = q[start:stop].float()
        if context == 0 and stop - start >= least:
            k, v = (torch.einsum("kr,hdr->khd", keys[:, :latent_dim], x[name].float()) for name in _FACTORS)
            scores = torch.einsum("hqd,khd->qhk", x["q_nope"][:, start:stop].float(), k)
            scores += torch.einsum("qhd,kd->qhk", own_q[..., latent_dim:], keys[:, latent_dim:])
            weights = (scores * settings["score_scale"]).masked_fill(is_hidden, -torch.inf).softmax(2)
            direct[start:stop] = torch.einsum("qhk,khd->qhd", weights, v).to(q.dtype)
        elif is_in_splits:
            for t, row in enumerate(own_q):
                seen = keys[: context + t + 1]
                weights = ((row @ seen.T) * settings["score_scale"]).softmax(1)
                attended[start + t] = (weights @ seen[:, :latent_dim]).to(q.dtype)
        else:
            scores = torch.einsum("qhd,kd->qhk", own_q, keys) * settings["score_scale"]
            weights = scores.masked_fill(is_hidden, -torch.inf).softmax(2)
            attended[start:stop] = (weights @ keys[:, :latent_dim]).to(q.dtype)
    return [attended, direct]
