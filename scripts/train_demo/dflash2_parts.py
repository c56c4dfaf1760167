"""What DFlash2 adds to the drafter in training: convolutions over a block's slots, and a selector of candidates.

Definition: z-lab's reference implementation (PyPI `dflash`, `DFlash2DraftModel`). Both parts start as the identity, so
that a DFlash drafter can be trained further as a DFlash2 drafter. It refuses to know about files and losses.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class BlockConv(nn.Module):
    """The two convolutions of a sublayer: their filters are a base plus a projection of the slot's normed state."""

    def __init__(self, *, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        base = torch.zeros(2, kernel_size, hidden_size)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)  # before and after the sublayer
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * hidden_size // group_size, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)
        self.group_size = group_size

    def filters(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[sequences, rows, hidden] -> the filters before the sublayer, and after it."""
        before, after = self.kernel_projection(x).chunk(2, dim=-1)
        return before, after

    def before(self, x: Tensor, filters: Tensor, num_slots: int) -> Tensor:
        return self._convolved(x, filters, self.base_kernel[0], num_slots)

    def after(self, x: Tensor, filters: Tensor, num_slots: int) -> Tensor:
        return self._convolved(x, filters, self.base_kernel[1], num_slots)

    def _convolved(self, x: Tensor, filters: Tensor, base: Tensor, num_slots: int) -> Tensor:
        """Causal within a block: a slot sees itself and the slots before it, as far as the kernel reaches."""
        kernel_size = len(base)
        grouped = x.view(len(x), -1, num_slots, x.shape[-1] // self.group_size, self.group_size)
        dynamic = filters.view(*grouped.shape[:3], kernel_size, -1)
        out = torch.zeros_like(grouped)
        for tap in range(kernel_size):
            shifted = functional.pad(grouped[:, :, : num_slots - tap], (0, 0, 0, 0, tap, 0))
            filter_of_tap = base[tap].view(-1, self.group_size).to(x.dtype) + dynamic[:, :, :, tap].unsqueeze(-1)
            out = out + filter_of_tap * shifted
        return out.reshape(x.shape)


class CandidateSelector(nn.Module):
    """The score of token b after token a in a slot with state h is its logit plus <P[a] * W h, S[b]>."""

    def __init__(self, *, hidden_size: int, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank) / 2)
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        nn.init.normal_(self.hidden_projection.weight, std=hidden_size**-0.5)

    def forward(
        self,
        hidden: Tensor,  # [..., hidden]
        previous: Tensor,  # int64 [...]: the token before each slot
    ) -> Tensor:  # [..., vocab], to be added to the logits
        query = self.predecessor_codebook[previous].to(hidden.dtype) * self.hidden_projection(hidden)
        return functional.linear(query, self.successor_codebook.to(hidden.dtype))
