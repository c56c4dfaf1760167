"""`dflash-trt build` without its words: proven checkpoints in, an engine directory out.

Knows how limits are resolved and what provenance says. Tensors come from `checkpoint/`, files go to `engine_dir/`.
"""

import hashlib
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Mapping as AbcMapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import torch

import dflash_trt
from dflash_trt.backends.base import Compiler, backend_of
from dflash_trt.checkpoint.pair import CheckpointPair, open_pair
from dflash_trt.checkpoint.sharding import mapping_problems
from dflash_trt.checkpoint.sources import CheckpointSources, find_checkpoints
from dflash_trt.checkpoint.specs import with_draft_window
from dflash_trt.compile.chat_template import ChatTemplateSettings, chat_template_settings
from dflash_trt.compile.checkpoint_export import (
    ExportPlan,
    context_arena_note,
    normalized,
    plan_export,
    with_defaults,
    with_whole_prompts,
    write_export,
)
from dflash_trt.compile.description import resolve_limits
from dflash_trt.compile.quantized import (
    PlanCallback,
    calibrate,
    component_sizes,
    engine_quantization,
    engine_weights,
    exact_weights_dtype,
    local_capability,
    plan_quantization,
)
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.dtype import stored_dtype, torch_dtype
from dflash_trt.core.errors import BuildError, CheckpointError, ConfigError, ErrorCollector, raise_all
from dflash_trt.core.quantization import Calibration
from dflash_trt.engine_dir import (
    ENGINE_VERSION,
    BuildRecord,
    EngineDir,
    EngineDirWriter,
    EngineFile,
    EngineLimits,
    EngineManifest,
    PretrainedConfig,
    ReservedOutput,
    needed_bytes_for,
    reserve_output,
    tensor_headers,
    write_engine_dir,
)
from dflash_trt.engine_dir.manifest import StepTables
from dflash_trt.engine_dir.provenance import TensorRTLLMRecord, TensorRTRecord
from dflash_trt.engine_dir.stored_tokenizer import CARD_NAME
from dflash_trt.engine_dir.tokenizer_dir import resolve_tokenizer
from dflash_trt.engine_dir.writing import SLACK_BYTES
from dflash_trt.quantize.plan import QuantizationPlan

BuildStage = Literal[
    "downloading",
    "checking",
    "hashing inputs",
    "calibrating the target",
    "calibrating the drafter",
    "writing weights",
    "compiling",
    "compiling kernels",
    "verifying",
]

_CHUNK_BYTES = 8 * 2**20
_KERNELS_BYTES = 8 * 2**20  # of an architecture; measured: 1 to 4 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildProgress:
    """Progress of a stage, in bytes, calibration prompts or TensorRT's steps; unmeasured totals are 0."""

    stage: BuildStage
    done_bytes: int = 0
    total_bytes: int = 0
    done_prompts: int = 0
    total_prompts: int = 0
    done_steps: int = 0
    total_steps: int = 0


ProgressCallback = Callable[[BuildProgress], None]


def build_engine(
    config: BuildConfig,
    output: Path,
    *,
    base_dir: Path,
    overwrite: bool,
    command: Sequence[str],
    progress: ProgressCallback,
    on_plan: PlanCallback | None = None,
    warn: Callable[[str], None] = lambda message: None,
) -> EngineDir:
    """Build `output` from the checkpoints that `config` names, relative to `base_dir`.

    Memory holds about one tensor at a time; while calibrating, the whole pair once. `on_plan` gets the plan of formats,
    `warn` hears of downloads and of what killed builds had left. `command` goes into provenance.json, so that errors
    about the engine can say how to build it again.

    Raises:
        ConfigError: a limit, a foreign config or the number of ranks is wrong.
        CheckpointError: the tensors or tokenizers are.
        BuildError: the output cannot be written, or another build is writing it.
    """

    def say(download: str) -> None:
        progress(BuildProgress(stage="downloading"))
        warn(download)

    with reserve_output(output, overwrite=overwrite, warn=warn) as reserved:
        sources = find_checkpoints(config, base_dir, needs_tensors=True, say=say)
        _build(sources, reserved, base_dir=base_dir, command=command, progress=progress, on_plan=on_plan)
    progress(BuildProgress(stage="verifying"))
    return EngineDir.open(output)


def _build(
    sources: CheckpointSources,
    output: ReservedOutput,
    *,
    base_dir: Path,
    command: Sequence[str],
    progress: ProgressCallback,
    on_plan: PlanCallback | None,
) -> None:
    """Everything between finding the checkpoints and opening the output."""
    started = time.monotonic()
    progress(BuildProgress(stage="checking"))
    checked = _check(sources, base_dir)
    config, pair, chat_template = checked.config, checked.pair, checked.chat_template
    if on_plan is not None:
        on_plan(checked.plan)
    inputs = _hash_inputs(pair, progress)
    calibration, note = _calibration(config, pair, checked.plan, base_dir, chat_template.options, inputs, progress)
    notes = [*sources.notes, *checked.notes, *pair.notes, *chat_template.notes, *([note] if note else [])]
    pretrained = PretrainedConfig(
        target=pair.target,
        draft=pair.draft if checked.export is None or pair.draft is None else normalized(pair.draft),
        dtype=config.dtype,
        weights_dtype=exact_weights_dtype(pair) if _stores_narrow_weights(config) else None,
        mapping=config.mapping,
        quantization=engine_quantization(checked.plan, calibration),
    )
    with write_engine_dir(output, needed_bytes=_needed_bytes(checked, pretrained)) as writer:
        for name, content in checked.tokenizer.items():
            writer.add_tokenizer_file(name, content)
        records = _write_models(writer, checked, pretrained, calibration, progress)
        record = BuildRecord(
            command=tuple(command),
            working_dir=str(Path.cwd()),
            config=config.model_dump(mode="json"),
            checkpoints={role: str(path.resolve()) for role, path in sources.paths.items()},
            hub=dict(sources.hub),
            inputs=inputs,
            versions=_versions(),
            notes=tuple(notes),
            component_bytes=component_sizes(checked.plan, config, pretrained.weights_dtype),
            build_time_s=round(time.monotonic() - started, 3),
        )
        options = chat_template.options
        writer.finish(pretrained, checked.limits, record, chat_template_options=options, **records)


class _Checked(NamedTuple):
    config: BuildConfig  # with what the backend makes of options that are left open
    compiler: Compiler | None
    pair: CheckpointPair
    limits: EngineLimits
    plan: QuantizationPlan
    tokenizer: AbcMapping[str, bytes]  # contents by file name
    chat_template: ChatTemplateSettings
    notes: Sequence[str]
    export: ExportPlan | None  # for backend tensorrt_llm


class _Records(TypedDict, total=False):
    """The models' records for `EngineDirWriter.finish`."""

    tensorrt: TensorRTRecord
    tensorrt_llm: TensorRTLLMRecord


def _check(sources: CheckpointSources, base_dir: Path) -> _Checked:
    """Check a build before any work, and raise all problems in one error."""
    config, paths, own_notes = sources.config, sources.paths, list[str]()
    has_export = config.backend == "tensorrt_llm"
    if has_export:
        config, own_notes = with_defaults(config)
    backend, mapping = backend_of(config.backend), config.mapping
    errors = ErrorCollector()
    compiler = errors.run(lambda: backend.compiler(config, base_dir))
    overrides = config.drafter_overrides
    opened = errors.run(lambda: open_pair(paths["target"], paths.get("drafter"), drafter_overrides=overrides))
    if opened is None:
        errors.raise_all("build")
    assert opened is not None
    pair = with_draft_window(opened, config.draft_window)
    cuts = mapping_problems(pair.target, pair.draft, mapping)
    tokenizer = errors.run(lambda: _resolve_tokenizer(paths["target"], pair))
    chat_template = ChatTemplateSettings()
    if tokenizer is not None:
        settings = errors.run(lambda: chat_template_settings(config, paths.get("drafter"), tokenizer))
        chat_template = settings or chat_template
    errors.run(lambda: raise_all(ConfigError, "tensor parallelism", cuts))
    resolved = errors.run(lambda: resolve_limits(config, pair.target, pair.draft))
    plan = errors.run(lambda: plan_quantization(config, pair, capability=local_capability()))
    unsupported = backend.unsupported(pair.target, pair.draft, None if plan is None else plan.spec(), mapping)
    errors.run(lambda: raise_all(BuildError, backend.subject, unsupported))
    if config.compile_for:
        errors.run(lambda: raise_all(BuildError, "compile_for", _kernel_problems(config, pair, plan)))
    export = None
    if has_export and resolved is not None and plan is not None:
        limits, more_notes = with_whole_prompts(config, resolved[0])
        resolved = limits, [*resolved[1], *more_notes]
        export = errors.run(lambda: plan_export(config, pair, plan, limits, paths))
        if pair.draft is not None and pair.draft.chain is None:
            own_notes.append(context_arena_note(pair.draft, limits))
    errors.raise_all("build")
    assert resolved is not None and plan is not None and tokenizer is not None
    limits, notes = resolved
    return _Checked(config, compiler, pair, limits, plan, tokenizer, chat_template, [*notes, *own_notes], export)


def _kernel_problems(config: BuildConfig, pair: CheckpointPair, plan: QuantizationPlan | None) -> list[str]:
    from dflash_trt.backends.cuda.kernel_build import kernel_problems

    return kernel_problems(config.compile_for, pair.target, pair.draft, None if plan is None else plan.spec())


def _stores_narrow_weights(config: BuildConfig) -> bool:
    """Where PyTorch widens them: a plan and kernels that are compiled ahead read the file as it is."""
    return config.backend == "torch" and config.dtype == "float32" and not config.compile_for


def _needed_bytes(checked: _Checked, pretrained: PretrainedConfig) -> int:
    if checked.export is not None:
        return checked.export.num_bytes + sum(map(len, checked.tokenizer.values())) + SLACK_BYTES
    compiler = checked.compiler
    library = None if compiler is None else compiler.plugin_library
    kernels_bytes = len(checked.config.compile_for) * _KERNELS_BYTES
    has_plans = compiler is not None
    return kernels_bytes + needed_bytes_for(pretrained, checked.tokenizer, has_plans=has_plans, plugin_library=library)


def _write_models(
    writer: EngineDirWriter,
    checked: _Checked,
    pretrained: PretrainedConfig,
    calibration: Calibration,
    progress: ProgressCallback,
) -> _Records:
    """Weights of every rank, or plans, or both checkpoints."""
    if checked.export is not None:
        return {"tensorrt_llm": _write_checkpoints(writer, checked, checked.export, pretrained, calibration, progress)}
    weights = _RankWeights(checked.pair, checked.plan, calibration, pretrained, progress)
    compiler, ranks = checked.compiler, range(pretrained.mapping.world_size)
    if compiler is None:
        for rank in ranks:
            writer.add_weights(rank, pretrained, weights.of_rank(rank))
        _add_kernels(writer, checked, pretrained, progress)
        return {}
    if compiler.plugin_library is not None:
        writer.add_plugin_library(compiler.plugin_library)
    plans = [_add_plan(writer, compiler, weights, rank, checked.limits) for rank in ranks]
    return {"tensorrt": plans[0]}


def _add_kernels(
    writer: EngineDirWriter, checked: _Checked, pretrained: PretrainedConfig, progress: ProgressCallback
) -> None:
    manifest = EngineManifest(
        version=ENGINE_VERSION,
        backend="torch",
        pretrained_config=pretrained,
        build_config=checked.limits,
        step=StepTables.current(),
        files={},
    )
    architectures = checked.config.compile_for
    for done, architecture in enumerate(architectures):
        from dflash_trt.backends.cuda.kernel_build import compile_kernels

        progress(BuildProgress(stage="compiling kernels", done_steps=done, total_steps=len(architectures)))
        writer.add_kernels(architecture, partial(compile_kernels, manifest=manifest, architecture=architecture))


def _write_checkpoints(
    writer: EngineDirWriter,
    checked: _Checked,
    export: ExportPlan,
    pretrained: PretrainedConfig,
    calibration: Calibration,
    progress: ProgressCallback,
) -> TensorRTLLMRecord:
    total_bytes, done_bytes = export.num_bytes, 0

    def on_bytes(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes = min(total_bytes, done_bytes + num_bytes)
        progress(BuildProgress(stage="writing weights", done_bytes=done_bytes, total_bytes=total_bytes))

    return write_export(writer, export, calibration, checked.config, pretrained, checked.limits, on_bytes=on_bytes)


def _resolve_tokenizer(directory: Path, pair: CheckpointPair) -> dict[str, bytes]:
    """Before any work, not when the engine is first asked to serve a text."""
    problems: list[str] = []
    files = resolve_tokenizer(pair.tokenizer_files, vocab_size=pair.target.vocab_size, problems=problems)
    raise_all(CheckpointError, f"tokenizer of target {directory}", problems)
    if files:  # other front ends read the two together
        files[CARD_NAME] = (directory / CARD_NAME).read_bytes()
    return files


@dataclass(frozen=True)
class _RankWeights:
    """The weights of each rank, one tensor in memory at a time and reported byte by byte."""

    pair: CheckpointPair
    plan: QuantizationPlan
    calibration: Calibration
    config: PretrainedConfig
    progress: ProgressCallback

    def of_rank(self, rank: int) -> Iterator[tuple[str, memoryview]]:
        """Names and contents, in the order of `tensor_headers`."""
        headers = tensor_headers(self.config)
        rank_bytes = sum(header.num_bytes for header in headers.values())
        total_bytes, done_bytes = rank_bytes * self.config.mapping.world_size, rank_bytes * rank
        self.progress(BuildProgress(stage="writing weights", done_bytes=done_bytes, total_bytes=total_bytes))
        mapping, dtype = self.config.mapping.of_rank(rank), torch_dtype(self.config.dtype)
        for name, tensor in engine_weights(self.pair, self.plan, self.calibration, dtype=dtype, mapping=mapping):
            stored = tensor.to(torch_dtype(stored_dtype(headers[name].dtype) or ""))  # exact: see `weights_dtype`
            content = stored.contiguous().reshape(-1).view(torch.uint8).numpy().data
            yield name, content
            done_bytes += content.nbytes
            self.progress(BuildProgress(stage="writing weights", done_bytes=done_bytes, total_bytes=total_bytes))


def _add_plan(
    writer: EngineDirWriter, compiler: Compiler, weights: _RankWeights, rank: int, limits: EngineLimits
) -> TensorRTRecord:
    """Write a rank's weights to a file, compile it, and remove it: the plan has them."""

    def advance(phase: str, done: int, total: int) -> None:
        weights.progress(BuildProgress(stage="compiling", done_steps=done, total_steps=total))

    config = weights.config
    with writer.temporary_weights(rank, config, weights.of_rank(rank)) as file, writer.add_plan(rank) as plan:
        return compiler(file, config, rank=rank, limits=limits, plan=plan, progress=advance)


def _calibration(
    config: BuildConfig,
    pair: CheckpointPair,
    plan: QuantizationPlan,
    base_dir: Path,
    template_options: AbcMapping[str, Any],
    inputs: dict[str, EngineFile],
    progress: ProgressCallback,
) -> tuple[Calibration, str | None]:
    """See `quantized.calibrate`."""

    def advance(part: str, done: int, total: int) -> None:
        stage: BuildStage = "calibrating the target" if part == "target" else "calibrating the drafter"
        progress(BuildProgress(stage=stage, done_prompts=done, total_prompts=total))

    hashes = [entry.sha256 for entry in inputs.values()]
    dtype = torch_dtype(config.dtype)
    return calibrate(
        config,
        pair,
        plan,
        base_dir=base_dir,
        template_options=template_options,
        input_hashes=hashes,
        dtype=dtype,
        advance=advance,
    )


def _hash_inputs(pair: CheckpointPair, progress: ProgressCallback) -> dict[str, EngineFile]:
    """SHA-256 and size of every file the engine comes from."""
    files = dict.fromkeys((*pair.source_files, *pair.tokenizer_files))
    total_bytes, done_bytes = sum(path.stat().st_size for path in files), 0
    inputs = {}
    for path in files:
        sha256, size_bytes = hashlib.sha256(), 0
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                sha256.update(chunk)
                size_bytes += len(chunk)
                done = done_bytes + size_bytes
                progress(BuildProgress(stage="hashing inputs", done_bytes=done, total_bytes=total_bytes))
        done_bytes += size_bytes
        inputs[str(path.parent.resolve() / path.name)] = EngineFile(sha256=sha256.hexdigest(), size_bytes=size_bytes)
    return inputs


def _versions() -> dict[str, str]:
    packages = {name: metadata.version(name) for name in ("torch", "transformers", "safetensors")}
    return {"dflash-trt": dflash_trt.__version__, "python": platform.python_version(), **packages}
