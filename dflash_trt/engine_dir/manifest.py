"""config.json of an engine directory: its fields, and how they must agree. Opens no other file."""

from collections import Counter
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, JsonValue, ValidationError, model_validator

from dflash_trt.core.config import Backend
from dflash_trt.core.dtype import FloatDType, safetensors_dtype, stored_dtype
from dflash_trt.core.errors import problem
from dflash_trt.core.frozen import Frozen, Index, Size, nearest_name
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec, check_pair, engine_states, engine_weights
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.state_spec import EngineStates
from dflash_trt.core.step_spec import DRAFT_OUTPUTS, STEP_INPUTS, STEP_OUTPUTS, StepTensor
from dflash_trt.core.weight_spec import WeightTable, rank_shard
from dflash_trt.engine_dir.provenance import PROVENANCE_NAME, EngineFile, TensorRTLLMRecord, TensorRTRecord, plan_name
from dflash_trt.engine_dir.tensor_file import TensorHeader

ENGINE_VERSION: Final = 3
MANIFEST_NAME = "config.json"
TOKENIZER_DIR = "tokenizer"


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if (
        path.is_absolute()
        or ".." in path.parts
        or str(path) != name
        or name in ("", ".", MANIFEST_NAME, PROVENANCE_NAME)
    ):
        raise ValueError("a plain path inside the engine directory")
    return name


class PretrainedConfig(Frozen):
    """The models. `mapping.rank` is 0: the directory holds every rank, and a reader puts its own in."""

    target: TargetSpec
    draft: DraftSpec | None = None
    dtype: FloatDType
    weights_dtype: FloatDType | None = None  # of stored linear layers and embeddings, where it is narrower
    mapping: Mapping = Mapping()
    quantization: QuantizationSpec | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.weights_dtype is not None and (self.dtype != "float32" or self.weights_dtype == "float32"):
            raise ValueError("a weights_dtype of 16 bits in an engine of float32, and in no other")
        if self.draft is not None:
            check_pair(self.target, self.draft)
        if self.quantization is not None:
            from dflash_trt.formats.registry import check_quantization  # loads torch, for quantized engines only

            check_quantization(self.quantization, self.target, self.draft)
        return self

    def states(self, *, has_drafter: bool = True) -> EngineStates:
        """States of each rank, optionally with the drafter's."""
        draft = self.draft if has_drafter else None
        return engine_states(self.target, draft, dtype=self.dtype, quantization=self.quantization).shard(self.mapping)


class EngineLimits(Frozen):
    """Limits that the engine was built for, as TensorRT-LLM names them.

    All but the batch size count tokens.
    """

    max_batch_size: Size
    max_seq_len: Annotated[Size, Field(ge=2)]
    max_num_tokens: Size
    max_draft_len: Index
    page_size: Size


class StepTensorFields(Frozen):
    """A row of core/step_spec.py, without its description."""

    name: str
    dtype: str
    axes: tuple[str, ...]


class StepTables(Frozen):
    inputs: tuple[StepTensorFields, ...]
    outputs: tuple[StepTensorFields, ...]

    @classmethod
    def current(cls) -> Self:
        """The step contract of this version of the code."""
        return cls(inputs=_rows(STEP_INPUTS), outputs=_rows((*STEP_OUTPUTS, *DRAFT_OUTPUTS)))


class EngineManifest(Frozen):
    """All of config.json. `files` names every other file except provenance.json, which hashes this one."""

    version: Literal[3]  # ENGINE_VERSION
    backend: Backend
    pretrained_config: PretrainedConfig
    build_config: EngineLimits
    step: StepTables
    tensorrt: TensorRTRecord | None = None  # record of the plans, for backend tensorrt
    tensorrt_llm: TensorRTLLMRecord | None = None  # for backend tensorrt_llm
    chat_template_options: dict[str, JsonValue] = Field(default_factory=dict)  # for conversations without their own
    files: dict[Annotated[str, AfterValidator(_inside)], EngineFile]

    @model_validator(mode="after")
    def _check(self) -> Self:
        trained = self.draft.max_draft_len if self.draft else 0
        if self.build_config.max_draft_len > trained:
            raise ValueError(f"max_draft_len of at most {trained}, the drafter's own")
        models = [self.target, *([self.draft] if self.draft else [])]
        most_positions = min(model.max_position_embeddings for model in models)
        if self.build_config.max_seq_len > most_positions:
            raise ValueError(f"max_seq_len of at most {most_positions}, the minimum of max_position_embeddings")
        for name, record in (("tensorrt", self.tensorrt), ("tensorrt_llm", self.tensorrt_llm)):
            if (record is not None) != (self.backend == name):
                raise ValueError(f"a '{name}' record for backend {name}, and for no other")
        if self.tensorrt is not None and self.tensorrt.page_windows not in ((), self._windows):
            raise ValueError(f"page_windows {list(self._windows)} in 'tensorrt', as in the models, or none")
        if self.pretrained_config.mapping.rank != 0:
            raise ValueError("mapping.rank 0, since the directory holds all ranks")
        return self

    @property
    def _windows(self) -> tuple[int, ...]:
        limits = self.build_config
        return self.pretrained_config.states().windows(limits.max_seq_len + limits.max_draft_len)

    @property
    def has_page_groups(self) -> bool:
        """True if layers with windows have pages of their own when the engine runs, if there are any."""
        return self.backend == "torch" or (self.tensorrt is not None and self.tensorrt.page_windows != ())

    @property
    def reports_drafts(self) -> bool:
        """True if the backend says which drafts it made."""
        return self.backend != "tensorrt_llm"

    @property
    def required_files(self) -> tuple[str, ...]:
        """Names that `files` must have: weights; or plans, which hold them, and plugins; or checkpoints."""
        if self.tensorrt_llm is not None:
            return self.tensorrt_llm.required_files(has_drafter=self.draft is not None)
        ranks = range(self.pretrained_config.mapping.world_size)
        if self.tensorrt is None:
            return tuple(map(weights_name, ranks))
        return (*map(plan_name, ranks), self.tensorrt.plugin_library)

    @property
    def target(self) -> TargetSpec:
        return self.pretrained_config.target

    @property
    def draft(self) -> DraftSpec | None:
        return self.pretrained_config.draft


def weights_name(rank: int) -> str:
    return f"rank{rank}.safetensors"


def tensor_headers(config: PretrainedConfig) -> dict[str, TensorHeader]:
    """Name, dtype and shape of every tensor in each `rank{r}.safetensors`, in the order of the file."""
    linears = config.quantization.linears if config.quantization else {}
    whole = engine_weights(config.target, config.draft, config.quantization)
    table = {name: rank_shard(spec, config.mapping) for name, spec in whole.items()}
    headers: dict[str, TensorHeader] = {}
    for name, spec in table.items():
        if name in linears:
            headers |= _quantized_headers(name, table, linears[name])
        else:
            dtype = spec.matrix_dtype(name, config.dtype, config.weights_dtype)
            headers[name] = TensorHeader(dtype=safetensors_dtype(dtype), shape=spec.shape)
    return headers


def _quantized_headers(name: str, table: WeightTable, format_name: str) -> dict[str, TensorHeader]:
    from dflash_trt.formats.registry import quantized_tensors

    return {
        key: TensorHeader(dtype=safetensors_dtype(tensor.dtype), shape=tensor.shape)
        for key, tensor in quantized_tensors(name, table, format_name).items()
    }


def file_problems(error: ValidationError, file_name: str) -> list[str]:
    """One problem for each of pydantic's errors in config.json or provenance.json."""
    return [_problem_of(details, file_name) for details in error.errors()]


def _problem_of(details: Any, file_name: str) -> str:
    name = ".".join(str(part) for part in details["loc"])
    subject = f"{file_name} key '{name}'" if name else file_name
    hint = "Build the engine again with this version of dflash-trt."
    if details["type"] == "extra_forbidden":
        nearest = nearest_name(name, EngineManifest.model_fields)
        guess = f"Did you mean '{nearest}'? Unless the file was edited, it is newer than this dflash-trt. "
        return f"{subject} is unknown. {guess if nearest else ''}{hint}"
    if details["type"] == "missing":
        return f"{subject} is missing. {hint}"
    expected = str(details["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    found = str(details["input"])
    return problem(subject, expected=expected, found=found if len(found) < 80 else f"{found[:80]}...", hint=hint)


def _rows(tensors: tuple[StepTensor, ...]) -> tuple[StepTensorFields, ...]:
    return tuple(StepTensorFields(name=tensor.name, dtype=tensor.dtype, axes=tensor.axes) for tensor in tensors)


Model = Literal["target", "draft"]


def rank_weight_bytes(config: PretrainedConfig) -> dict[Model, dict[str, int]]:
    """Bytes that each rank holds, by the format of linear layers and by the dtype of other tensors."""
    quantization = config.quantization or QuantizationSpec()
    has_one_dtype = config.weights_dtype is None
    target, draft = Counter[str](), Counter[str]()
    for name, header in tensor_headers(config).items():
        dtype = config.dtype if has_one_dtype and header.dtype != "I64" else stored_dtype(header.dtype)
        tensor_format = quantization.format_of(name) or str(dtype)
        (target if name.startswith("target.") else draft)[tensor_format] += header.num_bytes
    return {"target": dict(target), "draft": dict(draft)}


def weight_bytes_fields(by_format: dict[str, int], *, num_ranks: int) -> dict[str, object]:
    """As JSON: bytes of all ranks, together and by format."""
    of_all = {name: num_bytes * num_ranks for name, num_bytes in by_format.items()}
    return {"weights_bytes": sum(of_all.values()), "weights_bytes_by_format": of_all}
