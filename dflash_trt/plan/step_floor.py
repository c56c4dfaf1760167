"""The least time of a step: bytes over bandwidth, FLOPs over peak, and what the ranks exchange over their links.

No kernel is below it, and none reaches it. Weights are read once by each GEMM that uses them, K/V as far as a layer
sees, activations not at all: they fit into the caches. Experts are chosen evenly and independently of one another.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_trt.core.dtype import num_bytes_of
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import DecoderSpec
from dflash_trt.core.model.draft import DraftSpec, engine_weights
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gqa import Gqa
from dflash_trt.core.model.mla import Mla
from dflash_trt.core.state_spec import LayerState, SharedKv
from dflash_trt.core.weight_spec import WeightSpec, WeightTable, is_linear, rank_shard
from dflash_trt.engine_dir import PretrainedConfig, tensor_headers
from dflash_trt.plan.gpus import Gpu

_PLAIN_BITS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Requests that decode, the tokens of each before the step, and the drafts that each verifies and gets anew."""

    num_requests: int
    context_len: int
    num_draft_tokens: int

    @property
    def num_rows(self) -> int:
        return self.num_requests * (self.num_draft_tokens + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFloor:
    """Of each rank."""

    weights_bytes: int
    kv_bytes: int
    exchange_bytes: int
    flops: float
    memory_s: float
    compute_s: float
    exchange_s: float

    @property
    def total_s(self) -> float:
        return max(self.memory_s, self.compute_s) + self.exchange_s


@dataclass(frozen=True, kw_only=True, slots=True)
class _Use:
    """One GEMM's use of a weight: the part of its bytes that is read, and the rows that are multiplied with it."""

    name: str
    rows: float
    fraction: float = 1.0


def step_floor(config: PretrainedConfig, gpu: Gpu, step: Step, *, has_drafter: bool) -> StepFloor:
    """The floor of a step on a GPU whose bandwidth is known."""
    assert gpu.bytes_per_s is not None and gpu.link_bytes_per_s is not None
    uses = list(_uses(config, step, has_drafter=has_drafter))
    bytes_of, table = _bytes_by_weight(config), _rank_table(config)
    weights_bytes = round(sum(bytes_of[use.name] * use.fraction for use in uses))
    compute_s, flops = 0.0, 0.0
    for use in uses:
        if is_linear(table[use.name], use.name) or use.name == "target.embedding":
            done = 2 * use.rows * _elements(table[use.name])
            flops += done
            compute_s += done / gpu.flops_of(_operand_bits(config, use.name, gpu))
    attention = _attention_flops(config, step, has_drafter=has_drafter)
    kv_bytes = _kv_bytes(config, step, has_drafter=has_drafter)
    exchange_bytes = _exchange_bytes(config, step, has_drafter=has_drafter)
    return StepFloor(
        weights_bytes=weights_bytes,
        kv_bytes=kv_bytes,
        exchange_bytes=exchange_bytes,
        flops=flops + attention,
        memory_s=(weights_bytes + kv_bytes) / gpu.bytes_per_s,
        compute_s=compute_s + attention / gpu.flops_of(_PLAIN_BITS),
        exchange_s=exchange_bytes / gpu.link_bytes_per_s,
    )


def chosen_fraction(moe: Moe, num_rows: int) -> float:
    """Expected part of the experts that so many rows choose."""
    return 1.0 - (1.0 - moe.num_experts_per_token / moe.num_experts) ** num_rows


def _uses(config: PretrainedConfig, step: Step, *, has_drafter: bool) -> Iterator[_Use]:
    """Every use of a weight in a step. The rows of embeddings that the tokens name are too few to count."""
    table = engine_weights(config.target, config.draft, config.quantization)
    experts = _experts_of(config.target)
    for name, spec in table.items():
        if name.startswith("draft.") or name.endswith((".embedding", "lm_head")):
            continue
        moe = experts.get(name.rpartition(".")[0]) if spec.num_experts else None
        if moe is None:
            yield _Use(name=name, rows=step.num_rows)
        else:
            rows = step.num_rows * moe.num_experts_per_token / moe.num_experts
            yield _Use(name=name, rows=rows, fraction=chosen_fraction(moe, step.num_rows))
    yield _head(config, "target.lm_head", rows=step.num_rows)
    if has_drafter and config.draft is not None:
        yield from _draft_uses(config, config.draft, table, step)


def _draft_uses(config: PretrainedConfig, draft: DraftSpec, table: WeightTable, step: Step) -> Iterator[_Use]:
    """A chain uses its layer, norm and head once for each draft, on a row of each request."""
    num_passes = draft.num_passes(step.num_draft_tokens)
    rows = step.num_rows if draft.chain is None else step.num_requests
    for name, spec in table.items():
        if not name.startswith("draft.") or name.endswith((".embedding", "lm_head")) or spec.is_integer:
            continue
        is_of_context = name.startswith(("draft.fc", "draft.context_norm"))
        if is_of_context or name == "draft.kv":
            yield _Use(name=name, rows=step.num_rows)
        if not is_of_context:
            yield from [_Use(name=name, rows=rows)] * num_passes
    drafts = step.num_requests * step.num_draft_tokens
    yield from [_head(config, "draft.lm_head", rows=drafts / num_passes)] * num_passes if num_passes else []


def _head(config: PretrainedConfig, name: str, *, rows: float) -> _Use:
    """The named head, or the target's; of tied embeddings a rank reads its part of the rows."""
    table = engine_weights(config.target, config.draft, config.quantization)
    name = next((known for known in (name, "target.lm_head") if known in table), "target.embedding")
    if name != "target.embedding":
        return _Use(name=name, rows=rows)
    part = 1 / config.mapping.tp_size
    return _Use(name=name, rows=rows * part, fraction=part)


def _experts_of(decoder: DecoderSpec) -> dict[str, Moe]:
    return {
        f"{decoder.role}.layers.{i}.experts": layer.feed_forward
        for i, layer in enumerate(decoder.layers)
        if isinstance(layer.feed_forward, Moe)
    }


def _rank_table(config: PretrainedConfig) -> dict[str, WeightSpec]:
    whole = engine_weights(config.target, config.draft, config.quantization)
    return {name: rank_shard(spec, config.mapping) for name, spec in whole.items()}


def _bytes_by_weight(config: PretrainedConfig) -> dict[str, int]:
    """Codes and scales of a weight together."""
    sizes = dict.fromkeys(_rank_table(config), 0)
    for name, header in tensor_headers(config).items():
        sizes[name if name in sizes else name.rpartition(".")[0]] += header.num_bytes
    return sizes


def _elements(spec: WeightSpec) -> int:
    count = 1
    for size in spec.shape:
        count *= size
    return count


def _operand_bits(config: PretrainedConfig, name: str, gpu: Gpu) -> int:
    """Bits of the operands of a GEMM: those of the codes where activations are quantized, else of the activations."""
    format_name = None if config.quantization is None else config.quantization.linears.get(name)
    if format_name is None:
        return _PLAIN_BITS
    from dflash_trt.formats.registry import weight_format

    known = weight_format(format_name)
    if not known.has_input_scale or gpu.capability is None or gpu.capability < (known.first_capability or (0, 0)):
        return _PLAIN_BITS
    columns = known.columns_per_block * 2
    codes = next(iter(known.layout((1, columns), (1,)).values()))
    return codes.num_bytes * 8 // columns


def _models(config: PretrainedConfig, *, has_drafter: bool) -> Iterator[tuple[DecoderSpec, tuple[LayerState, ...]]]:
    states = config.states()
    yield config.target, states.target
    if has_drafter and config.draft is not None:
        yield config.draft, states.draft


def _kv_bytes(config: PretrainedConfig, step: Step, *, has_drafter: bool) -> int:
    """K and V that the layers' windows reach, read, and those of the step's rows, written; recurrent states, both.

    A chain reads its context once for each draft.
    """
    total = 0
    for decoder, states in _models(config, has_drafter=has_drafter):
        for features in states[decoder.num_layers :]:  # of a chain: a row is written, one of a request read
            total += features.bytes_per_token * (step.num_rows + step.num_requests)
        for layer, state in zip(decoder.layers, states, strict=False):
            if isinstance(layer.mixer, Gqa):
                seen = min(step.context_len, layer.mixer.mask.window or step.context_len)
                read = state.source if isinstance(state, SharedKv) else state
                num_reads = decoder.num_passes(step.num_draft_tokens) if isinstance(decoder, DraftSpec) else 1
                total += read.bytes_per_token * num_reads * step.num_requests * seen
                total += state.bytes_per_token * step.num_rows
            elif isinstance(layer.mixer, Mla):
                total += state.bytes_per_token * (step.num_requests * step.context_len + step.num_rows)
            else:
                total += 2 * state.bytes_per_slot * step.num_requests
    return total


def _attention_flops(config: PretrainedConfig, step: Step, *, has_drafter: bool) -> int:
    """Scores and their products with V."""
    total = 0
    for decoder, _ in _models(config, has_drafter=has_drafter):
        for gqa in decoder.attentions:
            seen = min(step.context_len, gqa.mask.window or step.context_len) + step.num_draft_tokens + 1
            total += 4 * gqa.shard(config.mapping).q_size * seen * step.num_rows
        for mla in decoder.latents:  # absorbed: scores over latents and keys, sums over latents
            num_products = mla.shard(config.mapping).num_heads * (2 * mla.latent_dim + mla.rope_dim)
            total += 2 * num_products * (step.context_len + step.num_draft_tokens + 1) * step.num_rows
    return total


def _exchange_bytes(config: PretrainedConfig, step: Step, *, has_drafter: bool) -> int:
    """Bytes that a rank receives: two all-reduces a layer, of which it needs twice (n - 1) / n, and the logits."""
    mapping: Mapping = config.mapping
    if mapping.tp_size == 1:
        return 0
    others = (mapping.tp_size - 1) / mapping.tp_size
    elements = 0.0
    for decoder, _ in _models(config, has_drafter=has_drafter):
        elements += 2 * 2 * decoder.num_layers * step.num_rows * decoder.hidden_size
    elements += step.num_rows * config.target.vocab_size
    if has_drafter and config.draft is not None:
        vocab_size = config.draft.draft_vocab_size or config.target.vocab_size
        elements += step.num_requests * step.num_draft_tokens * vocab_size
    return round(elements * others) * num_bytes_of(config.dtype)
