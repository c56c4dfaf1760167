"""The interface of a backend: it reports unsupported engines, compiles weights, and opens engines.

Each backend is one object, found by name, which imports its modules only when it needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

from dflash_trt.core.errors import problem
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.runtime_config import Device, RuntimeConfig
from dflash_trt.core.step_plan import StepExecutor
from dflash_trt.kernels.latent_rules import MAX_LATENT_DIM, MAX_ROPE_DIM
from dflash_trt.kernels.launch_rules import WIDE_HEAD_DIM, WIDE_MAX_GROUP
from dflash_trt.kernels.launching import MAX_DELTA_HEAD_DIM, MAX_DELTA_RECORDS

if TYPE_CHECKING:
    from dflash_trt.backends.page_budget import PagePlan
    from dflash_trt.backends.torch.process_group import RankGroup
    from dflash_trt.core.config import BuildConfig
    from dflash_trt.engine_dir import EngineDir, EngineLimits, PretrainedConfig
    from dflash_trt.engine_dir.provenance import TensorRTRecord
    from dflash_trt.engine_dir.tensor_file import ByteSink
    from dflash_trt.formats.base import WeightFormat

BackendName = Literal["torch", "cuda", "tensorrt", "tensorrt_llm"]  # engines of "torch" run on the first two


class EngineExecutor(StepExecutor, Protocol):
    """An executor that owns pages, and perhaps processes, which `close` ends."""

    @property
    def page_plan(self) -> PagePlan: ...

    def place_bytes(self, place: int, is_state: bool) -> list[memoryview]:
        """The memory of a place of the host's tier, for pages or a snapshot, of each rank; no copy may touch it."""
        ...

    def close(self) -> None: ...


StepsCallback = Callable[[str, int, int], None]  # phase, steps done, steps in all


class Compiler(Protocol):
    """Compiles one rank's weights after another. The engine gets a copy of `plugin_library`, if any."""

    @property
    def plugin_library(self) -> Path | None: ...

    def __call__(
        self,
        weights_file: Path,
        config: PretrainedConfig,
        *,
        rank: int,
        limits: EngineLimits,
        plan: ByteSink,
        progress: StepsCallback,
    ) -> TensorRTRecord:
        """Write the rank's plan, and return what config.json says of it."""
        ...


class Backend(Protocol):
    @property
    def subject(self) -> str:
        """The heading of an error about unsupported features."""
        ...

    def unsupported(
        self, target: TargetSpec, draft: DraftSpec | None, quantization: QuantizationSpec | None, mapping: Mapping
    ) -> list[str]:
        """Problems of an engine that this backend cannot run, as far as this machine knows; empty when it can."""
        ...

    def compiler(self, config: BuildConfig, base_dir: Path) -> Compiler | None:
        """Check the requirements of compiling before any work. Returns None if an engine needs only weights.

        Raises:
            BuildError: something is missing.
        """
        ...

    def open(
        self,
        engine: EngineDir,
        config: RuntimeConfig,
        *,
        rank: int = 0,
        ranks: RankGroup | None = None,
        draft_lens: Sequence[int] | None = None,
    ) -> EngineExecutor:
        """Open one rank of an engine: the only one, or one of the process group `ranks`.

        `config` is resolved, `draft_lens` as in `open_executor`.
        """
        ...


def backend_name(engine: EngineDir, device: Device) -> BackendName:
    """The backend that runs an engine on a resolved device."""
    if engine.manifest.backend != "torch":
        return engine.manifest.backend
    return "cuda" if device == "cuda" else "torch"


def backend_of(name: BackendName) -> Backend:
    """The backend of `backends/NAME/backend.py`."""
    return cast(Backend, import_module(f"dflash_trt.backends.{name}.backend").BACKEND)


def recurrent_problems(target: TargetSpec, draft: DraftSpec | None, *, where: str, hint: str) -> Iterator[str]:
    """A problem for gated delta nets that are larger than the kernels are made for."""
    nets = target.delta_nets
    sizes = {size for net in nets for size in (net.key_head_dim, net.value_head_dim)}
    for size in sorted(size for size in sizes if size > MAX_DELTA_HEAD_DIM):
        expected = f"at most {MAX_DELTA_HEAD_DIM} {where}"
        yield problem("head_dim of gated delta nets", expected=expected, found=str(size), hint=hint)
    if nets and draft is not None and draft.max_draft_len >= MAX_DELTA_RECORDS:
        expected = f"less than {MAX_DELTA_RECORDS} {where}, for a target with gated delta nets"
        instead = f"Build with fewer drafts, or {hint[0].lower()}{hint[1:]}"
        yield problem("max_draft_len", expected=expected, found=str(draft.max_draft_len), hint=instead)


def latent_problems(target: TargetSpec, *, where: str, hint: str) -> Iterator[str]:
    """A problem for latents that are larger than the kernels are made for."""
    most = {"latent_dim": MAX_LATENT_DIM, "rope_dim": MAX_ROPE_DIM}
    for name, size in sorted({(name, getattr(mla, name)) for mla in target.latents for name in most}):
        if size > most[name]:
            expected = f"at most {most[name]} {where}"
            yield problem(f"{name} of latent attention", expected=expected, found=str(size), hint=hint)


def wide_head_problems(target: TargetSpec, *, where: str, hint: str) -> Iterator[str]:
    """A problem for more query heads of a wide K/V head than the attention kernels take."""
    groups = {gqa.num_heads // gqa.num_kv_heads for gqa in target.attentions if gqa.head_dim > WIDE_HEAD_DIM}
    for heads_per_kv in sorted(count for count in groups if count > WIDE_MAX_GROUP):
        expected = f"at most {WIDE_MAX_GROUP} for a K/V head of more than {WIDE_HEAD_DIM} {where}"
        yield problem("num_attention_heads of the target", expected=expected, found=str(heads_per_kv), hint=hint)


def unsupported_formats(
    quantization: QuantizationSpec | None,
    computes: Callable[[WeightFormat], bool],
    *,
    hint: str,
    where: str = "",  # place of the weights, and the reason, for the message
    why: str = "",
) -> Iterator[str]:
    """A problem for each weight format of an engine that a back end has no GEMM for."""
    from dflash_trt.formats.registry import weight_formats

    linears = {} if quantization is None else quantization.linears
    computed = [name for name, known in weight_formats().items() if computes(known)]
    for name in sorted(set(linears.values()) - set(computed)):
        quantized = sorted(linear for linear, format_name in linears.items() if format_name == name)
        yield problem(
            "linear layers",
            expected=f"{', '.join(computed)} or unquantized weights{where}",
            found=f"{name}{why} in {quantized[0]} and {len(quantized) - 1} more",
            hint=hint,
        )
