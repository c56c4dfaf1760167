"""What a step does against sums written out by hand: prompt chunks, windows, states, experts, drafters, machines."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dflash_trt.bench.machine_probes import CPU_SIZES, probe_specs
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import LayerSpec, TargetSpec
from dflash_trt.core.model.dflash2 import BlockConv, CandidateSelector
from dflash_trt.core.model.dspark import DSparkHeads
from dflash_trt.core.model.feed_forward import Dense, Moe
from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.core.model.gqa import AttentionMask, Gqa
from dflash_trt.core.model.mla import Mla
from dflash_trt.core.model.rope import RopeSpec
from dflash_trt.engine_dir import PretrainedConfig
from dflash_trt.plan.computed_rows import ComputedRows
from dflash_trt.plan.gpus import Gpu
from dflash_trt.plan.step_floor import floor_of
from dflash_trt.plan.step_work import EngineWork, chosen_fraction

H, V, FFN = 64, 512, 128
ATTENTION = Gqa(num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeSpec(theta=1e4))
DELTA = GatedDelta(num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=8, conv_size=4)
LATENT = Mla(num_heads=4, latent_dim=32, nope_dim=16, rope_dim=8, v_head_dim=16, rope=RopeSpec(theta=1e4), scale=0.2)
MOE = Moe(num_experts=8, num_experts_per_token=2, intermediate_size=32, routing="softmax_top_k")


def work(
    *mixers: Gqa | Mla | GatedDelta,
    feed_forward: Dense | Moe | None = None,
    mapping: Mapping | None = None,
    num_dense: int = 0,
) -> EngineWork:
    """The first `num_dense` layers are dense ones, whatever the others are."""
    dense = Dense(intermediate_size=FFN)
    layers = tuple(
        LayerSpec(mixer=mixer, feed_forward=dense if i < num_dense else feed_forward or dense)
        for i, mixer in enumerate(mixers)
    )
    target = TargetSpec(
        family="qwen3",
        vocab_size=V,
        hidden_size=H,
        rms_norm_eps=1e-6,
        is_embedding_tied=True,
        max_position_embeddings=4096,
        layers=layers,
    )
    config = PretrainedConfig(target=target, dtype="float32", mapping=mapping or Mapping())
    return EngineWork(config, has_drafter=False)


def rows(*requests: tuple[int, int], drafts: int = 0) -> ComputedRows:
    """(tokens, context) of each."""
    tokens, contexts = np.array(requests).T
    return ComputedRows(num_tokens=tokens, context_lens=contexts, num_draft_tokens=drafts)


def test_a_prompt_chunk_reads_its_context_once_and_scores_every_key_before_each_token() -> None:
    found = work(ATTENTION).of(rows((5, 100), (1, 7)))
    token_bytes = 2 * 2 * 16 * 4
    assert found.kv_bytes == token_bytes * (100 + 7 + 6)
    keys = sum(range(101, 106)) + 8
    assert found.mixing_flops == 4 * ATTENTION.q_size * keys


@pytest.mark.parametrize("window", [1, 4, 8, 100])
def test_a_window_limits_what_each_token_of_a_chunk_sees(window: int) -> None:
    windowed = ATTENTION.model_copy(update={"mask": AttentionMask(window=window)})
    found = work(windowed).of(rows((9, 3), (2, 50)))
    keys = sum(min(position + 1, window) for position in (*range(3, 12), 50, 51))
    assert found.mixing_flops == 4 * ATTENTION.q_size * keys
    assert found.kv_bytes == 2 * 2 * 16 * 4 * (min(3, window) + min(50, window) + 11)


@pytest.mark.parametrize("chunk", [1, 5, 8, 100])
def test_a_chunk_of_positions_limits_it_in_jumps(chunk: int) -> None:
    chunked = ATTENTION.model_copy(update={"mask": AttentionMask(chunk=chunk)})
    found = work(chunked).of(rows((9, 3), (2, 50)))
    keys = sum(position % chunk + 1 for position in (*range(3, 12), 50, 51))
    assert found.mixing_flops == 4 * ATTENTION.q_size * keys
    assert found.kv_bytes == 2 * 2 * 16 * 4 * (3 % chunk + 50 % chunk + 11)


def test_a_recurrent_state_is_read_and_written_once_whatever_the_context() -> None:
    engine = work(DELTA)
    near, far = engine.of(rows((1, 10))), engine.of(rows((1, 4000)))
    assert near.kv_bytes == far.kv_bytes == 2 * engine._config.states().bytes_per_slot
    per_token = 4 * 16 * 8 * 6 + 2 * DELTA.num_channels * 4
    assert engine.of(rows((30, 0))).mixing_flops == 30 * per_token


def test_latents_are_absorbed_by_a_token_and_expanded_for_a_prompt() -> None:
    factors = 2 * 4 * (16 + 16) * 32  # K and V of a latent, or a query and a sum taken to latents and back
    decode = work(LATENT).of(rows((1, 1000)))
    assert decode.mixing_flops == 2 * 4 * (2 * 32 + 8) * 1001 + factors
    assert decode.kv_bytes == (32 + 8) * 4 * (1000 + 1)
    keys = 500 * 501 / 2
    assert work(LATENT).of(rows((500, 0))).mixing_flops == 2 * 4 * (16 + 16 + 8) * keys + factors * 500


def test_rows_choose_experts_and_each_expert_multiplies_its_share() -> None:
    found = work(ATTENTION, feed_forward=MOE).of(rows((6, 0), (10, 5)))
    expert = 3 * H * 32
    [product] = [item for item in found.products if item.rows not in (16.0, 2.0)]
    fraction = chosen_fraction(MOE, 16)
    assert 2 / 8 < fraction < 1
    assert product.elements == pytest.approx(8 * expert * fraction)
    assert product.flops == pytest.approx(2 * 16 * 2 * expert)  # two experts a token, however many are touched
    assert product.num_bytes == pytest.approx(4 * product.elements)


def test_the_head_computes_the_rows_that_give_tokens() -> None:
    found = work(ATTENTION).of(rows((100, 0), (1, 40)))
    head = [item for item in found.products if item.elements == H * V]
    assert [item.rows for item in head] == [2]
    assert found.num_logits == 2 * V


def test_a_machine_that_keeps_16_bits_reads_half_of_float32_weights_as_fast_as_its_caches() -> None:
    found = work(ATTENTION).of(rows((1, 0)))
    cpu = Gpu(
        name="cpu",
        memory_bytes=1 << 30,
        bytes_per_s=1e9,
        peak_flops={32: 1e9},
        read_bytes_per_s={1 << 10: 8e9, 1 << 20: 4e9},
    )
    plain, halved = floor_of(found, cpu), floor_of(found, replace(cpu, plain_weight_bits=16))
    elements = sum(item.elements for item in found.products)
    assert plain.weights_bytes - halved.weights_bytes == 2 * elements
    moved = plain.weights_bytes + plain.kv_bytes
    assert 1 << 10 < moved < 1 << 20
    assert 4e9 < moved / plain.memory_s < 8e9
    assert cpu.read_rate(1 << 9) == 8e9 and cpu.read_rate(1 << 30) == 4e9


def test_dflash2_filters_every_sublayer_of_its_block_and_projects_for_its_selector() -> None:
    target, draft = probe_specs(CPU_SIZES[0])
    conv, selector = BlockConv(kernel_size=3, group_size=32), CandidateSelector(rank=8, top_k=4)
    second = draft.model_copy(update={"algorithm": "dflash2", "conv": conv, "selector": selector})
    found = []
    for spec in (draft, second):
        config = PretrainedConfig(target=target, draft=spec, dtype="float32")
        step = ComputedRows.decode(num_requests=2, context_len=30, num_draft_tokens=7)
        found.append(EngineWork(config, has_drafter=True).of(step))
    hidden = draft.hidden_size
    filters = 2 * draft.num_layers * 2 * conv.num_coefficients(hidden) * hidden + selector.rank * hidden
    elements = [sum(item.elements for item in work.products) for work in found]
    assert elements[1] - elements[0] == filters
    assert found[1].mixing_flops == found[0].mixing_flops
    assert sum(p.flops for p in found[1].products) - sum(p.flops for p in found[0].products) == 2 * 16 * filters


@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("markov_type", ["vanilla", "gated", "rnn"])
def test_dspark_reads_its_markov_head_once_for_each_draft(markov_type: Any, from_anchor: bool) -> None:
    target, draft = probe_specs(CPU_SIZES[0])
    rank, hidden, drafts, requests = 8, draft.hidden_size, 7, 2
    heads = DSparkHeads(rank=rank, markov_type=markov_type, drafts_from_anchor=from_anchor)
    mixing = {"vanilla": 0, "gated": rank * (hidden + rank), "rnn": 3 * rank * (2 * rank + hidden)}[markov_type]
    step = ComputedRows.decode(num_requests=requests, context_len=30, num_draft_tokens=drafts)
    plain, walked = (
        EngineWork(PretrainedConfig(target=target, draft=spec, dtype="float32"), has_drafter=True).of(step)
        for spec in (draft, draft.model_copy(update={"algorithm": "dspark", "heads": heads}))
    )
    walk = [item for item in walked.products if item.rows == requests]
    assert sum(item.elements for item in walk) == drafts * (target.vocab_size * rank + mixing)
    names = ("draft.kv", *(f"draft.layers.{i}." for i in range(draft.num_layers)))
    matrices = [spec.shape for name, spec in draft.weights().items() if name.startswith(names) and len(spec.shape) == 2]
    saved = 2 * requests * sum(map(math.prod, matrices)) * from_anchor  # a slot less of each request
    assert sum(p.flops for p in plain.products) - saved == sum(p.flops for p in walked.products if p not in walk)
    assert (walked.mixing_flops < plain.mixing_flops) == from_anchor


def test_a_drafter_that_makes_no_draft_only_observes() -> None:
    target, draft = probe_specs(CPU_SIZES[0])
    config = PretrainedConfig(target=target, draft=draft, dtype="float32")
    with_drafter, without = (EngineWork(config, has_drafter=has) for has in (True, False))
    step = ComputedRows.decode(num_requests=3, context_len=50, num_draft_tokens=0)
    more, less = with_drafter.of(step), without.of(step)
    assert more.num_passes == 0 and more.num_layers == less.num_layers == target.num_layers
    observed = draft.hidden_size * (len(draft.target_layer_ids) * target.hidden_size + sum(draft.kv_sizes))
    assert sum(p.elements for p in more.products) - sum(p.elements for p in less.products) == observed
    drafting = with_drafter.of(ComputedRows.decode(num_requests=3, context_len=50, num_draft_tokens=7))
    assert drafting.num_passes == 1 and drafting.num_layers == target.num_layers + draft.num_layers


@pytest.mark.parametrize("feed_forward", [Dense(intermediate_size=640), Dense(intermediate_size=8), MOE])
@pytest.mark.parametrize("mixer", [ATTENTION, DELTA, LATENT])
def test_a_rank_of_two_mixes_half_of_the_heads(mixer: Gqa | Mla | GatedDelta, feed_forward: Dense | Moe) -> None:
    mapping, step = Mapping(world_size=2, tp_size=2), rows((9, 3), (1, 50))
    narrow = feed_forward.model_copy(update={"intermediate_size": feed_forward.intermediate_size // 2})
    found = work(mixer, mapping=mapping, feed_forward=feed_forward).of(step)
    half = work(mixer.shard(mapping), feed_forward=narrow).of(step)
    assert (found.mixing_flops, found.kv_bytes) == (half.mixing_flops, half.kv_bytes)
    assert found.activation_bytes == half.activation_bytes


def test_ranks_share_the_rows_of_a_tied_head() -> None:
    heads = [
        [item.elements for item in work(ATTENTION, mapping=mapping).of(rows((1, 9))).products if item.rows == 1]
        for mapping in (Mapping(), Mapping(world_size=2, tp_size=2))
    ]
    assert sum(heads[0]) == 2 * sum(heads[1])


def test_a_layer_that_shares_keys_and_values_reads_them_once_more_and_writes_none() -> None:
    shared = ATTENTION.model_copy(update={"shares_kv_with": 0})
    assert work(ATTENTION, shared).of(rows((5, 100))).kv_bytes == 2 * 2 * 16 * 4 * (2 * 100 + 5)


def test_operators_move_the_widest_part_of_each_layer() -> None:
    dense, moe = work(ATTENTION).of(rows((7, 0))), work(ATTENTION, feed_forward=MOE).of(rows((7, 0)))
    assert dense.activation_bytes == 2 * 4 * 7 * (2 * H + 3 * FFN)
    assert moe.activation_bytes == 2 * 4 * 7 * (3 * H + 8 + 2 * (32 + H))


@pytest.mark.parametrize(
    ("request_rows", "seen"), [((50, 0), 50 - 8), ((3, 40), 40), ((8, 100), 100)], ids=["prompt", "end of it", "decode"]
)
@pytest.mark.parametrize("window", [None, 16])
def test_a_block_sees_what_is_before_its_slots_and_itself(
    request_rows: tuple[int, int], seen: int, window: int | None
) -> None:
    target, draft = probe_specs(CPU_SIZES[0])
    draft = draft if window is None else draft.with_window(window)
    config = PretrainedConfig(target=target, draft=draft, dtype="float32")
    step = rows(request_rows, drafts=7)
    more, less = (EngineWork(config, has_drafter=has).of(step) for has in (True, False))
    [gqa], seen = draft.attentions, min(seen, window or seen)
    assert more.kv_bytes - less.kv_bytes == 2 * gqa.kv_size * 4 * (seen + request_rows[0])
    assert more.mixing_flops - less.mixing_flops == 4 * gqa.q_size * 8 * (seen + 8)
    assert more.num_logits == less.num_logits + 7 * target.vocab_size == (8 + 7) * target.vocab_size
    features = 2 * draft.hidden_size + 3 * 256
    assert more.activation_bytes - less.activation_bytes == 2 * 4 * 8 * features
