"""One calibration pass: the network's step on a prompt, with a LinearBank for chosen linear layers.

Each prompt is prefilled in chunks, and after each chunk the drafter drafts a block at its true place, from taps of the
unmodified target.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dflash_trt.backends.sequence_batch import sequence_batch
from dflash_trt.backends.step_inputs import step_inputs
from dflash_trt.backends.torch.loading import allocate_state, rotaries_of, states_of
from dflash_trt.backends.torch.moe import Choice, apply_expert, run_chosen_experts
from dflash_trt.backends.torch.ops import RopeTable, TorchOps, make_rope_table
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gqa import Gqa
from dflash_trt.core.model.mla import Mla
from dflash_trt.core.model.rope import Rotary
from dflash_trt.core.quantization import LayerKvScales
from dflash_trt.formats.base import E4M3_MAX
from dflash_trt.network.mixers.gqa import rotated_kv
from dflash_trt.network.ops import Experts, KvDestination, Linear, Rows, StepInputs
from dflash_trt.network.state import Cache, LatentCache, PagedCache, RecurrentCache
from dflash_trt.network.step import Network, run_step
from dflash_trt.quantize.calibrate import LinearBank

_PAGE_SIZE = 32


class CalibrationPass:
    """Owns the pages of one request; collects the ranges of K and V that reach them."""

    def __init__(self, network: Network[Tensor], *, max_tokens: int) -> None:
        self.input_amax: dict[str, float] = {}  # filled in by the bank's caller
        self._network = network
        self._num_draft_tokens = network.draft.max_draft_len if network.draft else 0
        dtype = network.target_weights.embedding.dtype
        num_positions = max_tokens + self._num_draft_tokens + 1
        self._rope = {
            rotary: make_rope_table(rotary, num_positions=num_positions, dtype=dtype) for rotary in rotaries_of(network)
        }
        self._num_pages = -(-max_tokens // _PAGE_SIZE)
        self._state = allocate_state(states_of(network, None), num_pages=self._num_pages, page_size=_PAGE_SIZE)
        self._kv_amax: dict[str, tuple[float, float]] = {}  # by name of the state

    def run(self, bank: LinearBank, prompt: Sequence[int], *, chunk_tokens: int) -> None:
        """Prefill one prompt. Raises ConfigError on activations that are not finite."""
        for start in range(0, len(prompt), chunk_tokens):
            inputs = step_inputs(
                sequence_batch(
                    prompt[start : start + chunk_tokens],
                    page_size=_PAGE_SIZE,
                    context_len=start,
                    num_draft_tokens=self._num_draft_tokens,
                )
            )
            ops = _ObservedOps(inputs, self._rope, num_draft_tokens=self._num_draft_tokens, observer=self, bank=bank)
            run_step(ops, self._network, inputs, self._state, num_draft_tokens=self._num_draft_tokens)
            ops.store_states()

    def kv_scales(self, part: str) -> tuple[LayerKvScales, ...]:
        """Per layer: amax / 448 in float32, as ModelOpt exports them; 1 for a layer that has no K and V."""
        pools = self._state.target_kv if part == "target" else self._state.draft_kv
        scales = []
        for i, cache in enumerate(pools):
            if isinstance(cache, RecurrentCache):
                scales.append(LayerKvScales())
                continue
            ranges = self._kv_amax[cache.spec.name]
            if not all(0.0 < amax < float("inf") for amax in ranges):
                subject, found = f"calibration: K and V of {part} layer {i}", f"{ranges[0]:g} and {ranges[1]:g}"
                hint = "Check the checkpoint, or keep K/V pages in the engine's dtype."
                raise ConfigError.about(subject, expected="finite, positive ranges", found=found, hint=hint)
            k, v = (torch.tensor(ranges) / E4M3_MAX).tolist()
            scales.append(LayerKvScales(k=k, v=v))
        return tuple(scales)

    def saw_kv(self, cache: PagedCache[Tensor], k: Tensor, v: Tensor) -> None:
        old = self._kv_amax.get(cache.spec.name, (0.0, 0.0))
        new = (k.abs().max().item(), v.abs().max().item())
        # `not (new <= old)` keeps a NaN where max() would drop it.
        largest = [n if not (n <= o) else o for n, o in zip(new, old, strict=True)]
        self._kv_amax[cache.spec.name] = (largest[0], largest[1])


class _ObservedOps(TorchOps):
    """One step, in which the linear layers of the bank are computed there."""

    def __init__(
        self,
        inputs: StepInputs[Tensor],
        rope_tables: Mapping[Rotary, RopeTable],
        *,
        num_draft_tokens: int,
        observer: CalibrationPass,
        bank: LinearBank,
    ) -> None:
        super().__init__(inputs, rope_tables, page_size=_PAGE_SIZE, num_draft_tokens=num_draft_tokens)
        self._observer = observer
        self._bank = bank

    def linear(self, x: Tensor, linear: Linear[Tensor]) -> Tensor:
        if linear.name not in self._bank:
            return super().linear(x, linear)
        assert isinstance(linear.weight, Tensor)
        out = self._bank(linear.name, x)[:, linear.first_row : linear.first_row + len(linear.weight)]
        return out if linear.bias is None else out + linear.bias

    def _run_experts(self, x: Tensor, experts: Experts[Tensor], moe: Moe, choice: Choice) -> Tensor:
        return run_chosen_experts(x, experts, moe, choice, self._expert)

    def _expert(self, x: Tensor, linear: Linear[Tensor]) -> Tensor:
        if linear.name in self._bank:
            self._bank.observe(linear.name, x)
        return apply_expert(x, linear)

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rows: Rows[Tensor],
        cache: Cache[Tensor],
        gqa: Gqa,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if rows.keeps_kv and k is not None and v is not None:
            self._observer.saw_kv(cache, k, v)
        return super().attend(q, k, v, rows, cache, gqa, sinks)

    def attend_latent(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latents: Tensor,
        k_rope: Tensor,
        kv_b: Tensor,
        rows: Rows[Tensor],
        cache: LatentCache[Tensor],
        mla: Mla,
    ) -> Tensor:
        row = torch.cat((latents, k_rope.flatten(1)), -1)
        self._observer.saw_kv(cache, row, row)
        return super().attend_latent(q_nope, q_rope, latents, k_rope, kv_b, rows, cache, mla)

    def store_kv(self, kv: Tensor, layers: Sequence[KvDestination[Tensor]], rows: Rows[Tensor], limits: Tensor) -> None:
        for layer, (k, v) in zip(layers, rotated_kv(self, kv, layers), strict=True):
            self._observer.saw_kv(layer.cache, k, v)
        super().store_kv(kv, layers, rows, limits)
