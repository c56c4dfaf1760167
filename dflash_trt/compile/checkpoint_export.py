"""Engine directories of backend tensorrt_llm: both checkpoints, exported, and the arguments for LLM."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.backends.tensorrt_llm.constraints import OUR_FORMATS, limits_problems
from dflash_trt.backends.tensorrt_llm.llm_args import llm_args
from dflash_trt.checkpoint.config_reader import with_overrides
from dflash_trt.checkpoint.foreign_names import ForeignTable
from dflash_trt.checkpoint.names import draft_names, embedding_name, target_names
from dflash_trt.checkpoint.pair import CONFIG_FILES, CheckpointPair
from dflash_trt.checkpoint.producers.base import SECTION, description_files, section_of
from dflash_trt.checkpoint.tensors import INDEX_FILE, StoredTensors, scan_tensors
from dflash_trt.compile.eagle3_export import (
    AUX_LAYERS,
    eagle3_changes,
    eagle3_config,
    eagle3_problems,
    is_embedding_shared,
)
from dflash_trt.compile.unified_export import (
    Export,
    QuantizedPart,
    flat_description,
    kv_changes,
    permuted_blocks,
    quantization_description,
    quantized_changes,
    quantized_parts,
)
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.dtype import torch_dtype
from dflash_trt.core.errors import BuildError, CheckpointError, problem, raise_all
from dflash_trt.core.json_object import read_json_object
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.quantization import Calibration, QuantizationConfig
from dflash_trt.engine_dir import EngineDirWriter, EngineLimits, PretrainedConfig
from dflash_trt.engine_dir.provenance import (
    DRAFTER_DIR,
    LLM_ARGS_NAME,
    TARGET_DIR,
    TRITON_MODEL_NAME,
    TensorRTLLMRecord,
    triton_model,
    yaml_text,
)
from dflash_trt.engine_dir.writing import json_bytes
from dflash_trt.quantize.plan import PlannedLinear, QuantizationPlan

_METHODS = ("modelopt", "fp8", "mxfp4")  # quant_method of checkpoints that TensorRT-LLM reads as they are
_QUANT_CONFIG = "hf_quant_config.json"


def with_defaults(config: BuildConfig) -> tuple[BuildConfig, list[str]]:
    """Defaults that TensorRT-LLM needs: an unquantized drafter and unquantized draft K/V."""
    asked = config.quantization or QuantizationConfig()
    chosen: dict[str, str] = {}
    if config.drafter is not None and asked.drafter is None and asked.target != "none":
        chosen["drafter"] = "none"
    if config.drafter is not None and asked.draft_kv_cache is None and asked.kv_cache != "none":
        chosen["draft_kv_cache"] = "none"
    if not chosen:
        return config, []
    quantization = QuantizationConfig(**asked.model_dump() | chosen)
    note = f"{' and '.join(chosen)} left unquantized: TensorRT-LLM takes the drafter's q, k, v and fc as they are"
    return config.model_copy(update={"quantization": quantization}), [note]


def with_whole_prompts(config: BuildConfig, limits: EngineLimits) -> tuple[EngineLimits, list[str]]:
    """Raise max_num_tokens to max_seq_len unless the build sets it: prompts are not cut in chunks."""
    if "max_num_tokens" in config.model_fields_set or limits.max_num_tokens >= limits.max_seq_len:
        return limits, []
    note = f"max_num_tokens is {limits.max_seq_len}, as max_seq_len: TensorRT-LLM computes a prompt in one step"
    return limits.model_copy(update={"max_num_tokens": limits.max_seq_len}), [note]


def normalized(draft: DraftSpec) -> DraftSpec:
    """The drafter as it is exported: with sorted taps, and an EAGLE-3 head in SafeAILab's format."""
    changed: dict[str, Any] = {"target_layer_ids": tuple(sorted(draft.target_layer_ids))}
    if draft.chain is not None:
        changed |= {"source_format": "eagle3", "has_own_embedding": not is_embedding_shared(draft)}
    return draft.model_copy(update=changed)


def context_arena_note(draft: DraftSpec, limits: EngineLimits) -> str:
    """Memory of DFlash's context; TensorRT-LLM keeps it for every slot and position, in 16 bits."""
    num_bytes = 2 * sum(draft.kv_sizes) * limits.max_seq_len * limits.max_batch_size
    return (
        f"the drafter's context takes {num_bytes / 2**30:.2f} GiB (all ranks together) for max_batch_size "
        f"{limits.max_batch_size} x max_seq_len {limits.max_seq_len}, used or not"
    )


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """Both checkpoints, checked: every problem is known before any work."""

    pair: CheckpointPair
    plan: QuantizationPlan
    target: Path
    drafter: Path | None
    stored: Mapping[str, StoredTensors]  # by the directory of the engine
    parts: Mapping[str, list[QuantizedPart]]
    names: Mapping[str, ForeignTable]

    @property
    def num_bytes(self) -> int:
        """Size of both checkpoints as they are stored, which is the most that is written."""
        return sum(tensor.num_bytes for stored in self.stored.values() for tensor in stored.tensors.values())


def plan_export(
    config: BuildConfig, pair: CheckpointPair, plan: QuantizationPlan, limits: EngineLimits, paths: Mapping[str, Path]
) -> ExportPlan:
    """Find every tensor of an export.

    Raises:
        BuildError: lists all that TensorRT-LLM could not load.
        CheckpointError: a file cannot be read.
    """
    target, drafter = paths["target"], paths.get("drafter")
    file_problems: list[str] = []
    stored = {TARGET_DIR: scan_tensors(target, label="target", problems=file_problems)}
    names = {TARGET_DIR: target_names(pair.target, stored[TARGET_DIR].tensors)}
    if drafter is not None and pair.draft is not None:
        stored[DRAFTER_DIR] = scan_tensors(drafter, label="drafter", problems=file_problems)
        names[DRAFTER_DIR] = draft_names(pair.draft, stored[DRAFTER_DIR].tensors)
    raise_all(CheckpointError, "checkpoints", file_problems)
    problems = list(limits_problems(limits, has_drafter=pair.draft is not None))
    problems += _checkpoint_problems(plan, stored[TARGET_DIR], target, drafter)
    if pair.draft is not None and pair.draft.chain is not None:
        (embedding,) = names[TARGET_DIR]["target.embedding"].parts
        problems += eagle3_problems(
            pair.draft, stored[DRAFTER_DIR], stored[TARGET_DIR].tensors[embedding], dtype=torch_dtype(config.dtype)
        )
    parts = {}
    for directory, prefix in ((TARGET_DIR, "target."), (DRAFTER_DIR, "draft.")):
        if directory in stored:
            linears = [linear for linear in plan.linears if linear.name.startswith(prefix)]
            parts[directory] = quantized_parts(linears, names[directory], stored[directory], problems)
    raise_all(BuildError, "backend tensorrt_llm", problems)
    return ExportPlan(pair=pair, plan=plan, target=target, drafter=drafter, stored=stored, parts=parts, names=names)


def write_export(
    writer: EngineDirWriter,
    export: ExportPlan,
    calibration: Calibration,
    config: BuildConfig,
    pretrained: PretrainedConfig,
    limits: EngineLimits,
    *,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> TensorRTLLMRecord:
    """Write both checkpoints and the arguments, one tensor at a time; `on_bytes` is called for each."""
    _write_tensors(writer, TARGET_DIR, _write_target(writer, export, calibration, config), on_bytes)
    if export.drafter is not None:
        _write_tensors(writer, DRAFTER_DIR, _write_drafter(writer, export, calibration, config), on_bytes)
    args = llm_args(pretrained, limits, has_tokenizer=bool(export.pair.tokenizer_files))
    writer.add_file(LLM_ARGS_NAME, yaml_text(args).encode())
    writer.add_file(TRITON_MODEL_NAME, yaml_text(_beside_triton(triton_model(args))).encode())
    return TensorRTLLMRecord(llm_args=args)


def _checkpoint_problems(
    plan: QuantizationPlan, stored: StoredTensors, target: Path, drafter: Path | None
) -> Iterator[str]:
    for label, directory in {"target": target, **({} if drafter is None else {"drafter": drafter})}.items():
        section = section_of(directory)
        method = section.get("quant_method", _METHODS[0]) if isinstance(section, dict) else _METHODS[0]
        if method not in _METHODS:
            expected, hint = f"one of {', '.join(_METHODS)}", "Use the unquantized checkpoint."
            yield problem(f"{label} quant_method", expected=expected, found=str(method), hint=hint)
    asked = [linear for linear in plan.linears if linear.is_to_be_quantized]
    for linear in asked:
        if linear.format not in OUR_FORMATS or linear.component in ("lm_head", "router"):
            expected = f"{' or '.join(OUR_FORMATS)} in attention, MLPs and experts"
            yield problem(linear.name, expected=expected, found=str(linear.format), hint="Leave it unquantized.")
    has_own_kv = plan.has_fp8_target_kv and plan.stored.target_kv is None
    is_changed = has_own_kv or any(linear.name.startswith("target.") for linear in asked)
    kept = next((linear for linear in plan.linears if linear.is_stored and linear.name.startswith("target.")), None)
    if is_changed and kept is not None:
        expected, hint = "an unquantized target, to quantize it", "Leave quantization out to pass it on as published."
        yield problem("target", expected=expected, found=f"{kept.format} in {kept.name}", hint=hint)
    if is_changed and not embedding_name(stored.tensors).startswith("model.embed"):
        hint = "Pass it on unquantized, or use the checkpoint of the language model alone."
        found = f"'{embedding_name(stored.tensors)}'"
        yield problem("target", expected="a language model alone, to quantize it", found=found, hint=hint)


def _write_target(writer: EngineDirWriter, export: ExportPlan, calibration: Calibration, config: BuildConfig) -> Export:
    """Everything but the tensors, which come back."""
    plan, parts, stored = export.plan, export.parts[TARGET_DIR], export.stored[TARGET_DIR]
    changes = quantized_changes(parts, calibration, dtype=torch_dtype(config.dtype))
    has_own_kv = plan.has_fp8_target_kv and plan.stored.target_kv is None
    if has_own_kv:
        assert calibration.target_kv is not None
        changes = kv_changes(changes, stored, calibration.target_kv)
    fields = read_json_object(export.target / CONFIG_FILES[0])
    if parts or has_own_kv:
        plain = _plain_modules(export, "target.")
        _add_description(writer, TARGET_DIR, fields, parts, plain, has_fp8_kv=has_own_kv)
    else:
        _pass_on_description(writer, TARGET_DIR, export.target)
    writer.add_file(f"{TARGET_DIR}/{CONFIG_FILES[0]}", json_bytes(fields))
    beside = dict.fromkeys((export.target / CONFIG_FILES[1], *export.pair.tokenizer_files))
    for path in beside:
        if path.is_file() and path.name != CONFIG_FILES[0]:
            writer.add_file(f"{TARGET_DIR}/{path.name}", path.read_bytes())
    return Export(stored=stored, changes=changes)


def _write_drafter(
    writer: EngineDirWriter, export: ExportPlan, calibration: Calibration, config: BuildConfig
) -> Export:
    """Everything but the tensors, which come back."""
    draft, stored, directory = export.pair.draft, export.stored[DRAFTER_DIR], export.drafter
    assert draft is not None and directory is not None
    parts = export.parts[DRAFTER_DIR]
    changes = quantized_changes(parts, calibration, dtype=torch_dtype(config.dtype))
    ids = draft.target_layer_ids
    order = sorted(range(len(ids)), key=lambda i: ids[i])
    (fc,) = export.names[DRAFTER_DIR]["draft.fc"].parts
    changes[fc] = permuted_blocks(stored.tensors[fc], order)
    if draft.chain is not None:
        changes |= eagle3_changes(stored, normalized(draft), order)
    given = with_overrides(
        read_json_object(directory / CONFIG_FILES[0]), config.drafter_overrides, label="drafter", notes=[], problems=[]
    )
    fields = dflash_config(given, draft)
    if draft.chain is not None:
        fields = eagle3_config(given, normalized(draft), dtype=config.dtype)
    if parts:
        _add_description(writer, DRAFTER_DIR, fields, parts, _plain_modules(export, "draft."), has_fp8_kv=False)
    else:
        _pass_on_description(writer, DRAFTER_DIR, directory)
    writer.add_file(f"{DRAFTER_DIR}/{CONFIG_FILES[0]}", json_bytes(fields))
    return Export(stored=stored, changes=changes)


def dflash_config(fields: Mapping[str, Any], draft: DraftSpec) -> dict[str, Any]:
    """A drafter's config.json for TensorRT-LLM: ids in `dflash_config`, top-level block_size, sorted taps."""
    changed, ids = dict(fields), list(normalized(draft).target_layer_ids)
    nested: dict[str, Any] = {**(changed.get("dflash_config") or {})}
    for name in ("mask_token_id", "target_layer_ids", "block_size"):
        changed.pop(name, None)
    nested |= {"mask_token_id": draft.mask_token_id, "target_layer_ids": ids}
    nested.pop("block_size", None)
    for section in (changed, nested):
        if section.get(AUX_LAYERS) is not None:
            section[AUX_LAYERS] = [layer_id + 1 for layer_id in ids]
    return {**changed, "block_size": draft.draft_block_size, "dflash_config": nested}


def _add_description(
    writer: EngineDirWriter,
    directory: str,
    fields: dict[str, Any],
    parts: list[QuantizedPart],
    plain: list[str],
    *,
    has_fp8_kv: bool,
) -> None:
    """Write hf_quant_config.json, and say the same in config.json."""
    formats = {part.module: part.format.name for part in parts}
    described = quantization_description(formats, plain, has_fp8_kv=has_fp8_kv)
    writer.add_file(f"{directory}/{_QUANT_CONFIG}", json_bytes(described))
    fields[SECTION] = flat_description(described)


def _pass_on_description(writer: EngineDirWriter, directory: str, source: Path) -> None:
    for name in description_files():
        if (source / name).is_file():
            writer.add_file(f"{directory}/{name}", (source / name).read_bytes())


def _plain_modules(export: ExportPlan, prefix: str) -> list[str]:
    """Modules with a matrix that stays as it is, which a loader must not take for a quantized one."""
    quantized: set[str] = {linear.name for linear in export.plan.linears if linear.is_to_be_quantized}
    directory = TARGET_DIR if prefix == "target." else DRAFTER_DIR

    def is_plain(linear: PlannedLinear) -> bool:
        return linear.name.startswith(prefix) and linear.name not in quantized

    names = [linear.name for linear in export.plan.linears if is_plain(linear)]
    table = export.names[directory]
    modules = {part for name in names if name in table for part in table[name].parts}
    if prefix == "target.":
        modules |= {"lm_head.weight", embedding_name(export.stored[directory].tensors)}
    return sorted({name.rpartition(".")[0] for name in modules})  # both tensors of all experts are of one


def _write_tensors(writer: EngineDirWriter, directory: str, export: Export, on_bytes: Callable[[int], None]) -> None:
    def reported(file_name: str) -> Iterator[tuple[str, memoryview]]:
        for name, content in export.contents(file_name):
            yield name, content
            on_bytes(content.nbytes)

    for file_name, headers in export.headers().items():
        writer.add_tensors(f"{directory}/{file_name}", headers, reported(file_name))
    index = export.index()
    if index is not None:
        writer.add_file(f"{directory}/{INDEX_FILE}", json.dumps(index, indent=2).encode())


def _beside_triton(args: Mapping[str, Any]) -> dict[str, Any]:
    """Paths relative to triton/."""
    moved = {**args, "model": f"../{args['model']}"}
    speculative = args.get("speculative_config")
    if isinstance(speculative, Mapping):
        drafter = f"../{speculative['speculative_model']}"
        moved["speculative_config"] = {**speculative, "speculative_model": drafter}
    return moved
