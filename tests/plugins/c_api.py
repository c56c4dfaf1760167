"""The plugin library's C API (plugins/include/dflash_trt_kernels.h) over torch tensors, shaped like a plugin node."""

import ctypes
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_trt.backends.tensorrt.plugins import PLUGINS

FLOAT_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_ATTENTION = (
    "heads kv_heads head_dim page_size window chunk is_causal is_window_anchored has_sinks shares_kv"
    " num_tokens num_requests block_rows pages_per_request state first_key"
)
_PAGES = "q k v state_pools positions token_offsets context_lens page_table sinks attended"
_DRAFT = (
    "context_k context_v q block_k block_v state_pools positions token_offsets page_table next_context_lens attended"
)


def _structure(name: str, fields: str, type_: Any) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": [(field, type_) for field in fields.split()]})


class AttentionShape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("float_type", "page_type")),
        *((name, ctypes.c_float) for name in ("k_scale", "v_scale", "softcap", "score_scale")),
        *((name, ctypes.c_int32) for name in _ATTENTION.split()),
    )


SamplingShape = _structure("SamplingShape", "float_type num_requests width vocab_size num_choices", ctypes.c_int32)
DraftsShape = _structure(
    "DraftsShape", "float_type num_requests num_slots vocab_size has_map num_choices", ctypes.c_int32
)
DRAFT_FIELDS = ("has_map", "num_choices")
PagesBuffers = _structure("PagesBuffers", _PAGES, ctypes.c_void_p)
DraftBuffers = _structure("DraftBuffers", _DRAFT, ctypes.c_void_p)
SamplingBuffers = _structure("SamplingBuffers", "inputs outputs", ctypes.POINTER(ctypes.c_void_p))


ExpertMatrix = _structure("ExpertMatrix", "form has_row_scale num_input_scales has_bias num_block_rows", ctypes.c_int32)


EXPERT_INTEGERS = (
    *("first_expert", "num_chosen", "routing", "normalizes", "has_choice_bias"),
    *("num_groups", "num_chosen_groups", "activation", "scales_inputs"),
)


class ExpertsShape(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in ["float_type", "num_rows", "hidden_size", "ffn_size", "num_experts", "num_here"]
        ),
        *((name, ctypes.c_int32) for name in EXPERT_INTEGERS),
        ("routing_scale", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
        ("gate_up", ExpertMatrix),
        ("down", ExpertMatrix),
    )


class ExpertsBuffers(ctypes.Structure):
    _fields_ = (("inputs", ctypes.POINTER(ctypes.c_void_p)), ("out", ctypes.c_void_p))


_ROWS = "float_type num_rows num_requests width page_size pages_per_request state"
RowsShape = _structure("RowsShape", _ROWS, ctypes.c_int32)
_DELTA = "float_type num_rows num_requests num_channels conv_size key_heads value_heads value_dim num_records state"


class DeltaShape(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_int32) for name in _DELTA.split()), ("eps", ctypes.c_float))


_LATENTS = (
    "float_type page_type num_rows num_requests pages_per_request num_heads row_size nope_dim value_dim"
    " latent_dim page_size max_verify_rows state"
)


class LatentsShape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in _LATENTS.split()),
        *((name, ctypes.c_float) for name in ("k_scale", "score_scale")),
    )


class LibraryError(Exception):
    pass


class PluginLibrary:
    """`library(name, inputs, fields)` is what the plugin node of that name computes; pages are written in place."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name in ("last_error", "architectures", "manifest_sha256", "contract"):
            getattr(self._library, f"dflash_trt_{name}").restype = ctypes.c_char_p

    def __call__(self, name: str, inputs: dict[str, Tensor], fields: dict[str, float]) -> list[Tensor]:
        contract = next(plugin for plugin in PLUGINS if plugin.name == name)
        assert set(inputs) == set(contract.inputs) and set(fields) == {*contract.fields, *contract.real_fields}
        own = {
            "AttendPages": self.attend_pages,
            "SampleAndAccept": self.sample_and_accept,
            "DraftTokens": self.draft_tokens,
            "Experts": self.experts,
            "GatedDelta": self.gated_delta,
            "PreviousRows": self.previous_rows,
            "AttendLatents": self.attend_latents,
        }
        return own.get(name, self._draft)(inputs, fields)

    @property
    def architectures(self) -> str:
        return self._text("architectures")

    @property
    def manifest_sha256(self) -> str:
        return self._text("manifest_sha256")

    @property
    def contract(self) -> dict[str, Any]:
        contract: dict[str, Any] = json.loads(self._text("contract"))
        return contract

    def workspace_bytes(self, name: str, inputs: dict[str, Tensor], fields: dict[str, float]) -> int:
        """Of "attend_pages", "attend_draft" or "attend_latents"."""
        is_of_latents = name == "attend_latents"
        shape = _latents_shape(inputs, fields) if is_of_latents else _attention_shape(inputs, fields, inputs["q"])
        return self._workspace(name, shape, torch.device("meta")).numel()

    def attend_pages(self, x: dict[str, Tensor], fields: dict[str, float]) -> list[Tensor]:
        shape = _attention_shape(x, fields, x["q"])
        attended = torch.empty_like(x["q"])
        workspace = self._workspace("attend_pages", shape, x["q"].device)
        self._call("attend_pages", shape, _buffers(PagesBuffers, x | {"attended": attended}), _address(workspace))
        return [attended.flatten(1)]

    def sample_and_accept(self, x: dict[str, Tensor], fields: dict[str, float]) -> list[Tensor]:
        num_requests, width = x["logit_rows"].shape
        sizes = (num_requests, width, x["logits"].shape[1], int(fields["num_choices"]))
        shape = SamplingShape(FLOAT_TYPES[x["logits"].dtype], *sizes)

        def integers(*size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=x["logits"].device)

        outputs = {
            "emitted_tokens": integers(num_requests, width),
            "emitted_logprobs": integers(num_requests, width).view(torch.float32),
            "num_accepted": integers(num_requests),
            "bonus_tokens": integers(num_requests),
            "next_context_lens": integers(num_requests),
        }
        workspace = self._workspace("sample_and_accept", shape, x["logits"].device)
        contract = next(plugin for plugin in PLUGINS if plugin.name == "SampleAndAccept")
        buffers = SamplingBuffers(_addresses(x, contract.inputs), _addresses(outputs, contract.outputs))
        self._call("sample_and_accept", shape, buffers, _address(workspace))
        return list(outputs.values())

    def draft_tokens(self, x: dict[str, Tensor], fields: dict[str, float]) -> list[Tensor]:
        logits, num_requests = x["logits"], len(x["seed"])
        num_slots, (has_map, num_choices) = len(logits) // num_requests, (int(fields[x]) for x in DRAFT_FIELDS)
        sizes = (num_requests, num_slots, logits.shape[1], has_map, num_choices)
        shape = DraftsShape(FLOAT_TYPES[logits.dtype], *sizes)

        def integers(num_columns: int) -> Tensor:
            return torch.empty((num_requests, num_slots * num_columns), dtype=torch.int32, device=logits.device)

        tokens = {"token_ids": integers(1), "draft_choices": integers(num_choices)}
        tokens |= {"draft_chances": integers(num_choices).view(torch.float32)}
        workspace = self._workspace("draft_tokens", shape, logits.device)
        contract = next(plugin for plugin in PLUGINS if plugin.name == "DraftTokens")
        buffers = SamplingBuffers(_addresses(x, contract.inputs), _addresses(tokens, contract.outputs))
        self._call("draft_tokens", shape, buffers, _address(workspace))
        return list(tokens.values())

    def experts(self, x: dict[str, Tensor], fields: dict[str, float]) -> list[Tensor]:
        shape = _experts_shape(x, fields)
        out = torch.empty_like(x["x"])
        workspace = self._workspace("experts", shape, x["x"].device)
        workspace.random_()  # it holds anything
        contract = next(plugin for plugin in PLUGINS if plugin.name == "Experts")
        buffers = ExpertsBuffers(_addresses(x, contract.inputs), ctypes.c_void_p(out.data_ptr()))
        self._call("experts", shape, buffers, _address(workspace))
        return [out]

    def gated_delta(self, x: dict[str, Tensor], fields: dict[str, float]) -> list[Tensor]:
        num_channels, conv_size = x["conv"].shape
        heads, value_dim = len(x["log_rate"]), len(x["norm"])
        sizes = (len(x["qkvz"]), len(x["slot_ids"]), num_channels, conv_size, int(fields["num_key_heads"]), heads)
        more = (value_dim, int(fields["num_records"]), int(fields["state"]), fields["eps"])
        shape = DeltaShape(FLOAT_TYPES[x["qkvz"].dtype], *sizes, *more)
        out = torch.empty((len(x["qkvz"]), heads * value_dim), dtype=x["qkvz"].dtype, device=x["qkvz"].device)
        workspace = self._workspace("gated_delta", shape, out.device)
        workspace.random_()  # it holds anything
        contract = next(plugin for plugin in PLUGINS if plugin.name == "GatedDelta")
        buffers = ExpertsBuffers(_addresses(x, contract.inputs), ctypes.c_void_p(out.data_ptr()))
        self._call("gated_delta", shape, buffers, _address(workspace))
        return [out]

    def previous_rows(self, x: dict[str, Tensor], fields: dict[str, float]) -> list[Tensor]:
        rows, (num_requests, pages_per_request) = x["x"], x["page_table"].shape
        sizes = (*rows.shape[:1], num_requests, rows.shape[1], int(fields["page_size"]), pages_per_request)
        shape = RowsShape(FLOAT_TYPES[rows.dtype], *sizes, int(fields["state"]))
        before = torch.empty_like(rows)
        contract = next(plugin for plugin in PLUGINS if plugin.name == "PreviousRows")
        buffers = ExpertsBuffers(_addresses(x, contract.inputs), ctypes.c_void_p(before.data_ptr()))
        self._call("previous_rows", shape, buffers)
        return [before]

    def attend_latents(self, x: dict[str, Tensor], fields: dict[str, float]) -> list[Tensor]:
        shape = _latents_shape(x, fields)
        heads = (shape.num_rows, shape.num_heads)
        outputs = {
            "attended": x["q"].new_zeros(*heads, shape.latent_dim),
            "direct": x["q"].new_full((*heads, shape.value_dim), torch.nan),
        }
        workspace = self._workspace("attend_latents", shape, x["q"].device)
        workspace.random_()  # it holds anything
        contract = next(plugin for plugin in PLUGINS if plugin.name == "AttendLatents")
        buffers = SamplingBuffers(_addresses(x, contract.inputs), _addresses(outputs, contract.outputs))
        self._call("attend_latents", shape, buffers, _address(workspace))
        return list(outputs.values())

    def _draft(self, x: dict[str, Tensor], fields: dict[str, float]) -> list[Tensor]:
        if "q" not in x:
            shape = _attention_shape(x, fields, None)
            self._call("write_draft_context", shape, _buffers(DraftBuffers, x))
            return []
        shape = _attention_shape(x, fields, x["q"])
        attended = torch.empty_like(x["q"])
        workspace = self._workspace("attend_draft", shape, x["q"].device)
        self._call("attend_draft", shape, _buffers(DraftBuffers, x | {"attended": attended}), _address(workspace))
        return [attended.flatten(1)]

    def _workspace(self, name: str, shape: Any, device: torch.device) -> Tensor:
        num_bytes = ctypes.c_size_t()
        self._check(
            getattr(self._library, f"dflash_trt_{name}_workspace")(ctypes.byref(shape), ctypes.byref(num_bytes))
        )
        return torch.empty(num_bytes.value, dtype=torch.uint8, device=device)

    def _call(self, name: str, shape: Any, buffers: Any, *workspace: ctypes.c_void_p) -> None:
        stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
        function = getattr(self._library, f"dflash_trt_{name}")
        self._check(function(ctypes.byref(shape), ctypes.byref(buffers), *workspace, ctypes.c_void_p(stream)))

    def _check(self, result: int) -> None:
        if result != 0:
            raise LibraryError(self._text("last_error"))

    def _text(self, name: str) -> str:
        text: bytes = getattr(self._library, f"dflash_trt_{name}")()
        return text.decode()


def _attention_shape(x: dict[str, Tensor], fields: dict[str, float], q: Tensor | None) -> Any:
    num_requests, pages_per_request = x["page_table"].shape
    _, kv_heads, head_dim = x["k" if "k" in x else "context_k"].shape
    return AttentionShape(
        float_type=FLOAT_TYPES[next(iter(x.values())).dtype],  # by contract the first input is of F
        page_type=int(fields["page_type"]),
        k_scale=fields["k_scale"],
        v_scale=fields["v_scale"],
        softcap=fields.get("softcap", 0.0),
        score_scale=fields.get("score_scale", 0.0),
        heads=kv_heads if q is None else q.shape[1],
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=int(fields["page_size"]),
        window=int(fields.get("window", 0)),
        chunk=int(fields.get("chunk", 0)),
        is_causal=int(fields.get("is_causal", 1)),
        is_window_anchored=int(fields.get("is_window_anchored", 0)),
        has_sinks=int(fields.get("has_sinks", 0)),
        shares_kv=int(fields.get("shares_kv", 0)),
        num_tokens=len(x["positions"]),
        num_requests=num_requests,
        block_rows=0 if q is None else len(q) // num_requests,
        pages_per_request=pages_per_request,
        state=int(fields["state"]),
        first_key=int(fields.get("first_key", 0)),
    )


def _latents_shape(x: dict[str, Tensor], fields: dict[str, float]) -> Any:
    num_rows, num_heads, row_size = x["q"].shape
    return LatentsShape(
        float_type=FLOAT_TYPES[x["q"].dtype],
        num_rows=num_rows,
        num_requests=x["page_table"].shape[0],
        pages_per_request=x["page_table"].shape[1],
        num_heads=num_heads,
        row_size=row_size,
        nope_dim=x["q_nope"].shape[2],
        value_dim=x["v_factor"].shape[1],
        k_scale=fields["k_scale"],
        score_scale=fields["score_scale"],
        **{name: int(fields[name]) for name in ("page_type", "latent_dim", "page_size", "max_verify_rows", "state")},
    )


def _experts_shape(x: dict[str, Tensor], fields: dict[str, float]) -> Any:
    num_here, rows, _ = x["gate_up_codes"].shape

    def matrix(prefix: str) -> Any:
        return ExpertMatrix(
            form=int(fields[f"{prefix}_form"]),
            has_row_scale=int(fields[f"{prefix}_has_row_scale"]),
            num_input_scales=x[f"{prefix}_input_scale"].shape[1] if fields[f"{prefix}_has_input_scale"] else 0,
            has_bias=int(fields[f"{prefix}_has_bias"]),
            num_block_rows=x[f"{prefix}_block_scale"].shape[1],
        )

    return ExpertsShape(
        float_type=FLOAT_TYPES[x["x"].dtype],
        num_rows=len(x["x"]),
        hidden_size=x["x"].shape[1],
        ffn_size=rows // 2,
        num_experts=x["logits"].shape[1],
        num_here=num_here,
        routing_scale=fields["routing_scale"],
        limit=fields["limit"],
        alpha=fields["alpha"],
        gate_up=matrix("gate_up"),
        down=matrix("down"),
        **{name: int(fields[name]) for name in EXPERT_INTEGERS},
    )


def _buffers(structure: Any, tensors: dict[str, Tensor]) -> Any:
    for name, tensor in tensors.items():
        assert tensor.is_contiguous(), name
    names = [name for name, _ in structure._fields_]
    return structure(**{name: tensors[name].data_ptr() for name in names if name in tensors})


def _addresses(tensors: dict[str, Tensor], names: tuple[str, ...]) -> Any:
    for name in names:
        assert tensors[name].is_contiguous(), name
    return (ctypes.c_void_p * len(names))(*(tensors[name].data_ptr() for name in names))


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
