"""plugins/README.md in PyTorch: what each plugin node computes."""

import functools
import re
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from dflash_trt.backends.tensorrt.plugins import NO_SOFTCAP, NO_WINDOW
from dflash_trt.backends.torch import attention as torch_attention
from dflash_trt.backends.torch import attention_plan, paged_rows
from dflash_trt.backends.torch import sampling as torch_sampling
from dflash_trt.backends.torch.fixed_shapes import in_blocks
from dflash_trt.backends.torch.gated_delta_fixed import gated_delta_in_order
from dflash_trt.backends.torch.int8_linear import apply_int8
from dflash_trt.backends.torch.logprobs import score_rows
from dflash_trt.backends.torch.moe import activated
from dflash_trt.backends.torch.quantized_linear import quantized_fp8, quantized_nvfp4
from dflash_trt.backends.torch.sampling import adjust_scores
from dflash_trt.backends.torch.scores import Scores
from dflash_trt.core.logit_rules import LogitRules
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.core.quantization import LayerKvScales
from dflash_trt.core.state_spec import PagedRows
from dflash_trt.core.step_plan import TokenMasks
from dflash_trt.formats.fp8 import e4m3
from dflash_trt.formats.int8 import Int8Weight
from dflash_trt.kernels.experts_launch import ACTIVATIONS
from dflash_trt.kernels.launch_rules import FP8, INT8
from dflash_trt.kernels.programs import PROGRAMS
from dflash_trt.kernels.routing_launch import KINDS, Router
from dflash_trt.network.ops import StepInputs
from dflash_trt.network.state import RowCache
from tests.caches import cache_of
from tests.kernels import reference_experts
from tests.plugins.delta_cases import run_reference as run_delta
from tests.plugins.expert_cases import decoded
from tests.plugins.latent_cases import run_reference as run_latents
from tests.trt.host_memory import view_at


class PluginReference:
    """Runs a node, from its named inputs and its fields."""

    def __init__(self) -> None:
        self.programs = {program.name: program for program in PROGRAMS}

    def __call__(self, node, given: list[Tensor]) -> list[Tensor]:
        program = self.programs[node.name]
        assert set(node.fields) == {field.name for field in program.fields}
        named = dict(zip(program.input_names, given, strict=True))
        return getattr(self, f"_{re.sub('(?<!^)(?=[A-Z])', '_', node.name).lower()}")(named, node.fields)

    def _attend_in_splits(self, x, settings):
        return self._attend_pages(x, settings, is_tiled=True)

    def _attend_pages(self, x, settings, *, is_tiled=False):
        num_rows = int(x["token_offsets"][-1])  # rows and requests that pad a step come last, and have no tokens
        num_requests = int((x["token_offsets"].diff() > 0).sum())
        padding = torch.zeros(len(x["q"]) - num_rows, x["q"].shape[1:].numel(), dtype=x["q"].dtype)
        if num_requests == 0:
            return [padding]
        x = x | {name: x[name][:num_rows] for name in ("q", "k", "v", "positions")}  # of k and v, there may be none
        x |= {name: x[name][:num_requests] for name in ("context_lens", "page_table")}
        x["token_offsets"] = x["token_offsets"][: num_requests + 1]
        sizes = {"context_lens": x["context_lens"], "width": 1}
        plan = self._plan(x, settings, **sizes, has_fixed_shapes=is_tiled)
        pages = _pages(x, settings, like=x["k"])
        attention = AttentionMask(window=_window(settings), chunk=settings["chunk"] or None)
        kv = (None, None) if settings["shares_kv"] else (x["k"], x["v"])
        given = (x["q"], *kv, _scaled(pages, settings))
        scores = _scores(settings, sinks=x["sinks"] if settings["has_sinks"] else None, is_tiled=is_tiled)
        return [torch.cat([torch_attention.attend_rows(plan, *given, attention, scores), padding])]

    def _attend_draft(self, x, settings):
        if not settings["shares_kv"]:
            self._write_draft_context(x, settings)
        pages = _pages(x, settings, like=x["context_k"])
        context_lens = x["next_context_lens"]
        width = len(x["q"]) // len(context_lens)
        sizes = {"page_size": settings["page_size"], "num_slots": width}
        plan = attention_plan.plan_blocks(x["page_table"], context_lens, window=_window(settings), **sizes)
        flags = {name: bool(settings[name]) for name in ("is_causal", "is_window_anchored")}
        attention = AttentionMask(window=_window(settings), first_key=settings["first_key"], **flags)
        given = (x["q"], x["block_k"], x["block_v"], _scaled(pages, settings))
        return [torch_attention.attend_blocks(plan, *given, attention, _scores(settings))]

    def _write_draft_context(self, x, settings):
        page_size, pages = settings["page_size"], _pages(x, settings, like=x["context_k"])
        context_k, context_v = x["context_k"], x["context_v"]
        if pages.dtype == torch.float8_e4m3fn:
            scaled = ((context_k, settings["k_scale"]), (context_v, settings["v_scale"]))
            context_k, context_v = (e4m3(rows.float() / scale) for rows, scale in scaled)
        for r in range(len(x["next_context_lens"])):
            for t in range(int(x["token_offsets"][r]), int(x["token_offsets"][r + 1])):
                position = int(x["positions"][t])
                if position < x["next_context_lens"][r]:
                    page = int(x["page_table"][r, position // page_size])
                    pages[page, 0, position % page_size] = context_k[t]
                    pages[page, 1, position % page_size] = context_v[t]
        return [torch.zeros(1, dtype=torch.int32)]

    def _previous_rows(self, x, settings):
        num_rows, is_there = int(x["token_offsets"][-1]), x["token_offsets"].diff() > 0  # padding comes last
        before, num_requests = torch.zeros_like(x["x"]), int(is_there.sum())
        if num_rows == 0:
            return [before]
        spec = PagedRows(name="rows", width=x["x"].shape[1], dtype="float32")
        shape = (int(x["page_table"].max()) + 1, settings["page_size"], spec.width)
        pages = view_at(int(x["state_pools"][settings["state"]]), shape, x["x"].dtype)
        x = x | {"token_offsets": x["token_offsets"][: num_requests + 1], "positions": x["positions"][:num_rows]}
        x |= {"context_lens": x["context_lens"][:num_requests]}
        table = x["page_table"][:num_requests]
        before[:num_rows] = paged_rows.previous_rows(x["x"][:num_rows], _inputs(x), table, RowCache(pages, spec))
        return [before]

    def _sample_and_accept(self, x, settings):
        num_drafts = x["logit_rows"].shape[1] - 1
        if settings["draft_topk"]:
            assert x["draft_topk_ids"].shape[1] == x["draft_topk_probs"].shape[1] == num_drafts * settings["draft_topk"]
        else:
            assert x["draft_topk_ids"].shape == x["draft_topk_probs"].shape == (1, 1) and num_drafts == 0
            x = x | {"draft_topk_ids": None, "draft_topk_probs": None}
        adjust = None if len(x["row_masks"]) == 1 else functools.partial(_adjust, x)
        logits = x["logits"][: x["logit_rows"].numel()]
        acceptance = torch_sampling.sample_and_accept(logits, _inputs(x), adjust)
        return [getattr(acceptance, item.name) for item in fields(acceptance)]

    def _score_rows(self, x, settings):
        """Without the last row, which is of nothing."""
        rows, tokens = x["scored_rows"][:-1], x["scored_tokens"][:-1]
        made = score_rows(x["logits"], settings["num_top"], rows=rows, tokens=tokens)
        return [torch.cat((part, part.new_zeros(1, *part.shape[1:]))) for part in made]

    def _draft_tokens(self, x, settings):
        targets = x["draft_to_target"] if settings["has_map"] else None
        acceptance = SimpleNamespace(next_context_lens=x["next_context_lens"])
        count = settings["draft_topk"]
        made = torch_sampling.draft_tokens(x["logits"], _inputs(x), acceptance, targets, draft_topk=count)
        width = made.tokens.shape[1] * count
        draft_topk_ids, draft_topk_probs = made.draft_topk_ids, made.draft_topk_probs
        if draft_topk_ids is None or draft_topk_probs is None:  # no rejection sampling
            draft_topk_ids, draft_topk_probs = (
                torch.zeros(len(made.tokens), width, dtype=x) for x in (torch.int32, torch.float32)
            )
        return [made.tokens, draft_topk_ids, draft_topk_probs]

    def _experts(self, x, settings):
        kinds = {number: kind for kind, number in KINDS.items()}
        router = Router(
            kind=kinds[settings["routing"]],
            num_chosen=settings["num_chosen"],
            normalizes=bool(settings["normalizes"]),
            factor=settings["routing_scale"],
            choice_bias=x["choice_bias"] if settings["has_choice_bias"] else None,
            num_groups=settings["num_groups"],
            num_chosen_groups=settings["num_chosen_groups"],
        )
        ids, weights = reference_experts.route(x["logits"], router)
        if INT8 in (settings["gate_up_form"], settings["down_form"]):
            return [_int8_experts(x, settings, ids, weights)]
        gate_up, down = (decoded(x, settings, prefix) for prefix in ("gate_up", "down"))
        ids = ids - settings["first_expert"]
        is_here = (ids >= 0) & (ids < len(down))
        moe = _moe(settings)
        out = reference_experts.run_experts(
            x["x"].float(),
            gate_up,
            down,
            torch.where(is_here, ids, -1),
            weights,
            activation=lambda both: activated(both, moe),
            scales_inputs=bool(settings["scales_inputs"]),
            biases=(_bias(x, settings, "gate_up"), _bias(x, settings, "down")),
            quantize_input=_rounding(x, settings, "gate_up"),
            quantize_hidden=lambda hidden, e: _rounding(x, settings, "down")(hidden, e, 0),
        )
        return [out.to(x["x"].dtype)]

    def _gated_delta(self, x, settings):
        return run_delta(x, settings)

    def _attend_latents(self, x, settings):
        return run_latents(x, settings)

    def _linear(self, x, settings):
        """In calls of a fixed shape, so that a row depends on no other."""
        named = {f"weight_{name}": tensor if name == "block_rows" else tensor[None] for name, tensor in x.items()}
        named |= {"x": x["x"]}
        fields = {f"weight_{name}": value for name, value in settings.items()}
        weight = decoded(named, fields, "weight")[0]
        rows = _rounding(named, fields, "weight")(x["x"].float(), 0, 0)
        out = in_blocks(lambda block: block @ weight.T, rows)
        return [(out + x["bias"].float() if settings["has_bias"] else out).to(x["x"].dtype)]

    def _int8_linear(self, x, settings):
        weight = Int8Weight(segments=(len(x["codes"]),), codes=x["codes"], weight_scale=x["weight_scale"])
        return [apply_int8(x["x"], weight, x["bias"] if settings["has_bias"] else None)]

    def _rms_norm(self, x, settings):
        rows = x["x"].float()
        normed = rows / (rows.square().mean(-1, keepdim=True) + settings["eps"]).sqrt()
        return [(normed * x["weight"]).to(x["x"].dtype)]

    def _gated_delta_in_order(self, x, settings):
        return run_delta(x, settings, compute=gated_delta_in_order)

    def _attend_latents_in_splits(self, x, settings):
        return run_latents(x, settings, is_in_splits=True)

    def _head_product(self, x, settings):
        """In calls of a fixed shape, so that a row depends on no other."""
        by_heads = zip(x["x"].float().unbind(1), x["factor"].float(), strict=True)
        outs = [in_blocks(lambda block, weight=weight: block @ weight, rows) for rows, weight in by_heads]
        return [torch.stack(outs, 1).to(x["x"].dtype)]

    def _plan(self, x, settings, *, context_lens, width, has_fixed_shapes=False):
        step = _inputs(x | {"context_lens": context_lens, "logit_rows": torch.zeros(len(context_lens), width)})
        sizes = {"page_size": settings["page_size"], "num_draft_tokens": width - 1}
        sizes |= {"has_fixed_shapes": has_fixed_shapes}
        return attention_plan.plan_attention(step, window=_window(settings), **sizes)


def _adjust(x, scores):
    """The rules of each request's slot, then the masks of rows."""
    assert len(x["row_masks"]) == len(scores) + 1
    width = x["logit_rows"].shape[1]
    num_known = x["positions"][x["logit_rows"].long()].numpy() + 1
    for row, slot in enumerate(x["slot_ids"].tolist()):
        if x["has_rules"][slot]:
            own = scores[row * width : (row + 1) * width]
            adjust_scores(own, _rules_of(x, slot), x["tokens"][slot].numpy().astype(np.int64), num_known[row])
    row_masks = x["row_masks"][:-1].numpy()
    rows = np.flatnonzero(row_masks)
    masks = TokenMasks(rows=rows, bits=x["mask_bits"].numpy()[row_masks[rows] - 1])
    scores.copy_(torch_sampling.masked_scores(scores, masks))


def _rules_of(x, slot):
    num_biases = int(x["num_biases"][slot])
    repetition, presence, frequency = x["penalties"][slot].tolist()
    of_biases = {name: x[name][slot, :num_biases].numpy() for name in ("bias_tokens", "bias_values", "bias_ends")}
    return LogitRules(
        num_prompt_tokens=int(x["num_prompt_tokens"][slot]),
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        token_ids=of_biases["bias_tokens"].astype(np.int64),
        biases=of_biases["bias_values"],
        ends=of_biases["bias_ends"].astype(np.int64),
        prefixes=x["prefixes"][slot, :num_biases].numpy().astype(np.int64),
    )


def _bias(x, settings, prefix):
    bias = x[f"{prefix}_bias"].float()
    return bias if settings[f"{prefix}_has_bias"] else torch.zeros(x[f"{prefix}_codes"].shape[:2])


def _moe(settings, **more):
    """What the reference backend reads of a node's `Moe`."""
    activation = {number: name for name, number in ACTIVATIONS.items()}[settings["activation"]]
    return SimpleNamespace(activation=activation, limit=settings["limit"], alpha=settings["alpha"], **more)


def _int8_experts(x, settings, ids, weights):
    gate_up, down = (
        reference_experts.int8_experts(
            x[f"{prefix}_codes"],
            x[f"{prefix}_row_scale"],
            x[f"{prefix}_bias"] if settings[f"{prefix}_has_bias"] else None,
        )
        for prefix in ("gate_up", "down")
    )
    moe = _moe(settings, num_experts=x["logits"].shape[1], scales_inputs=settings["scales_inputs"])
    first = settings["first_expert"]
    return reference_experts.run_int8_experts(x["x"], gate_up, down, ids, weights, moe, first_expert=first)


def _rounding(x, settings, prefix):
    """As the format rounds the activations of an expert and a segment."""
    if not settings[f"{prefix}_has_input_scale"]:
        return lambda values, expert, segment: values
    quantized = quantized_fp8 if settings[f"{prefix}_form"] == FP8 else quantized_nvfp4
    scales = x[f"{prefix}_input_scale"]

    def rounded(values, expert, segment):
        scale = float(scales[expert, min(segment, scales.shape[1] - 1)])
        return quantized(values, scale).float() * scale

    return rounded


def _pages(x, settings, *, like):
    """The pages at the node's address, as many as the page table needs."""
    dtype = torch.float8_e4m3fn if settings["page_type"] else like.dtype
    shape = (int(x["page_table"].max()) + 1, 2, settings["page_size"], *like.shape[1:])
    return view_at(int(x["state_pools"][settings["state"]]), shape, dtype)


def _scaled(pages, settings):
    if pages.dtype != torch.float8_e4m3fn:
        return cache_of(pages)
    return cache_of(pages, LayerKvScales(k=settings["k_scale"], v=settings["v_scale"]))


def _window(settings):
    return None if settings["window"] == NO_WINDOW else settings["window"]


def _scores(settings, *, sinks=None, is_tiled=False):
    softcap = None if settings["softcap"] == NO_SOFTCAP else settings["softcap"]
    return Scores(scale=settings["score_scale"], softcap=softcap, sinks=sinks, is_tiled=is_tiled)


def _inputs(named):
    return StepInputs(**{item.name: named.get(item.name) for item in fields(StepInputs)})
