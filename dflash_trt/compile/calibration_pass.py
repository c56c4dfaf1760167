"""One calibration pass: the network's own step on a prompt, with chosen linears computed by a LinearBank.

Each prompt is prefilled in chunks, and after each chunk the drafter drafts a block at its true place, from taps of
the target as it is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_trt.backends.torch.ops import RopeTable, TorchOps, make_rope_table
from dflash_trt.core.errors import ConfigError, problem
from dflash_trt.core.model_spec import AttentionSpec, DecoderSpec
from dflash_trt.core.quantization import LayerKvScales
from dflash_trt.formats.base import E4M3_MAX
from dflash_trt.network.ops import Acceptance, Experts, Linear, StepInputs, StepState
from dflash_trt.network.step import Network, run_step
from dflash_trt.network.weights import LayerWeights
from dflash_trt.quantize.calibrate import LinearBank

_PAGE_SIZE = 32

LinearPlaces = dict[int, tuple[str, slice]]  # id of a Linear -> canonical name, rows


class CalibrationPass:
    """Owns the pages of one request; collects the ranges of K and V that reach them."""

    def __init__(self, network: Network[Tensor], *, max_tokens: int) -> None:
        self.input_amax: dict[str, float] = {}  # filled in by whoever ran the bank
        self._network = network
        self._places = _linear_places(network)
        self._num_draft_tokens = network.draft.max_draft_len if network.draft else 0
        dtype = network.target_weights.embedding.dtype
        decoders: list[DecoderSpec] = [network.target] + ([network.draft] if network.draft else [])
        num_positions = max_tokens + self._num_draft_tokens + 1
        self._rope = [(spec, make_rope_table(spec, num_positions=num_positions, dtype=dtype)) for spec in decoders]
        self._num_pages = -(-max_tokens // _PAGE_SIZE)
        pools = [
            [
                torch.zeros(self._num_pages, 2, _PAGE_SIZE, spec.num_kv_heads, spec.head_dim, dtype=dtype)
                for _ in range(spec.num_layers)
            ]
            for spec in decoders
        ]
        self._state: StepState[Tensor] = StepState(target_kv=pools[0], draft_kv=pools[1] if network.draft else ())
        self._kv_amax: dict[int, tuple[float, float]] = {}  # by id of the layer's pages

    def run(self, bank: LinearBank, prompt: Sequence[int], *, chunk_tokens: int) -> None:
        """Prefill one prompt. Raises ConfigError on activations that are not finite."""
        for start in range(0, len(prompt), chunk_tokens):
            inputs = _chunk_inputs(prompt[start : start + chunk_tokens], start, self._num_pages, self._num_draft_tokens)
            ops = _ObservedOps(inputs, self._rope, num_draft_tokens=self._num_draft_tokens, observer=self, bank=bank)
            run_step(ops, self._network, inputs, self._state, num_draft_tokens=self._num_draft_tokens)

    def kv_scales(self, part: str) -> tuple[LayerKvScales, ...]:
        """Per layer: amax / 448, as ModelOpt exports them."""
        pools = self._state.target_kv if part == "target" else self._state.draft_kv
        scales = []
        for i, pages in enumerate(pools):
            ranges = self._kv_amax[id(pages)]
            if not all(0.0 < amax < float("inf") for amax in ranges):
                subject, found = f"calibration: K and V of {part} layer {i}", f"{ranges[0]:g} and {ranges[1]:g}"
                mend = "Check the checkpoint, or keep K/V pages in the engine's dtype."
                raise ConfigError(problem(subject, expected="finite, positive ranges", found=found, mend=mend))
            scales.append(LayerKvScales(k=ranges[0] / E4M3_MAX, v=ranges[1] / E4M3_MAX))
        return tuple(scales)

    def place_of(self, linear: Linear[Tensor]) -> tuple[str, slice]:
        return self._places[id(linear)]

    def saw_kv(self, pages: Tensor, k: Tensor, v: Tensor) -> None:
        old = self._kv_amax.get(id(pages), (0.0, 0.0))
        new = (k.abs().max().item(), v.abs().max().item())
        # `not (new <= old)` keeps a NaN where max() would drop it.
        self._kv_amax[id(pages)] = tuple(n if not (n <= o) else o for n, o in zip(new, old, strict=True))  # type: ignore[assignment]


class _ObservedOps(TorchOps):
    """One step. Linears in the bank are computed there; all others as always."""

    def __init__(
        self,
        inputs: StepInputs[Tensor],
        rope_tables: Sequence[tuple[DecoderSpec, RopeTable]],
        *,
        num_draft_tokens: int,
        observer: CalibrationPass,
        bank: LinearBank,
    ) -> None:
        super().__init__(inputs, rope_tables, page_size=_PAGE_SIZE, num_draft_tokens=num_draft_tokens)
        self._observer = observer
        self._bank = bank

    def linear(self, x: Tensor, linear: Linear[Tensor]) -> Tensor:
        name, rows = self._observer.place_of(linear)
        if name not in self._bank:
            return super().linear(x, linear)
        out = self._bank(name, x)[:, rows]
        return out if linear.bias is None else out + linear.bias

    def attend_pages(
        self, q: Tensor, k: Tensor, v: Tensor, pages: Tensor, attention: AttentionSpec, sinks: Tensor | None
    ) -> Tensor:
        self._observer.saw_kv(pages, k, v)
        return super().attend_pages(q, k, v, pages, attention, sinks)

    def attend_draft(
        self,
        context: tuple[Tensor, Tensor],
        q: Tensor,
        block: tuple[Tensor, Tensor],
        pages: Tensor,
        acceptance: Acceptance[Tensor],
        attention: AttentionSpec,
    ) -> Tensor:
        self._observer.saw_kv(pages, *context)
        return super().attend_draft(context, q, block, pages, acceptance, attention)


def _linear_places(network: Network[Tensor]) -> LinearPlaces:
    """Which canonical linear, and which of its rows, every bound Linear is; a shared head is the target's."""
    weights, draft, draft_weights = network.target_weights, network.draft, network.draft_weights
    everything = slice(None)
    places: LinearPlaces = {}
    if draft is not None and draft_weights is not None:
        rows = 2 * draft.kv_size
        places[id(draft_weights.fc)] = ("draft.fc", everything)
        places[id(draft_weights.context_kv)] = ("draft.kv", everything)
        places[id(draft_weights.lm_head)] = ("draft.lm_head", everything)
        for i, layer in enumerate(draft_weights.layers):
            places[id(draft_weights.q[i])] = (f"draft.layers.{i}.q", everything)
            places[id(draft_weights.block_kv[i])] = ("draft.kv", slice(i * rows, (i + 1) * rows))
            places |= _layer_places(f"draft.layers.{i}", layer)
    places[id(weights.lm_head)] = ("target.lm_head", everything)
    for i, layer in enumerate(weights.layers):
        places[id(weights.qkv[i])] = (f"target.layers.{i}.qkv", everything)
        places |= _layer_places(f"target.layers.{i}", layer)
    return places


def _layer_places(prefix: str, layer: LayerWeights[Tensor]) -> LinearPlaces:
    """Of what follows attention. Experts are no linears: they keep the engine's dtype."""
    mlp = layer.mlp
    linears = {"o": layer.o}
    linears |= {"router": mlp.router} if isinstance(mlp, Experts) else {"gate_up": mlp.gate_up, "down": mlp.down}
    return {id(linear): (f"{prefix}.{kind}", slice(None)) for kind, linear in linears.items()}


def _chunk_inputs(tokens: Sequence[int], start: int, num_pages: int, num_draft_tokens: int) -> StepInputs[Tensor]:
    """A greedy step of one request that prefills `tokens` from position `start` on."""
    num_tokens = len(tokens)

    def int32(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return StepInputs(
        token_ids=int32(tokens),
        positions=int32(range(start, start + num_tokens)),
        token_offsets=int32([0, num_tokens]),
        context_lens=int32([start]),
        page_table=int32(range(num_pages))[None],
        logit_rows=int32([num_tokens - 1] * (num_draft_tokens + 1))[None],
        num_candidates=int32([0]),
        temperature=torch.zeros(1),
        top_k=int32([0]),
        top_p=torch.ones(1),
        min_p=torch.zeros(1),
        seed=torch.zeros(1, dtype=torch.int64),
    )
