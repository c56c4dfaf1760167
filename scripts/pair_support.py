"""Which back end runs which published pair, asked of the back ends themselves, on specs of the published shapes.

A form of a pair is what it is built from: a checkpoint that is quantized as it was published, or the unquantized one in
bfloat16, FP8 or FP4, with its drafter in bfloat16. Nothing here says what is supported; it asks.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.backends.base import backend_of
from dflash_trt.backends.cuda.backend import format_problems, model_problems
from dflash_trt.backends.tensorrt_llm.constraints import config_problems
from dflash_trt.checkpoint.sharding import mapping_problems
from dflash_trt.checkpoint.specs import PairSpecs, read_specs
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import DFlashError
from dflash_trt.core.known_pairs import KnownPair, known_pairs
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.core.model.mla import Mla
from dflash_trt.core.quantization import QuantizationConfig
from dflash_trt.engine_dir import PretrainedConfig
from dflash_trt.plan.gpus import Gpu, gpu_of
from dflash_trt.plan.planning import EnginePlan, plan_engine
from dflash_trt.quantize.hardware import require_hardware
from dflash_trt.quantize.plan import QuantizationPlan, make_plan, sharding_problems
from scripts.published_shapes import TARGETS, write_config

GPUS = (gpu_of("h200"), gpu_of("b300"))
RANKS = (1, 2, 4, 8)
_ASKED = {"bf16": "none", "FP8": "fp8", "FP4": "nvfp4"}
MAX_BATCH_SIZE, MAX_SEQ_LEN = 64, 32768


@dataclass(frozen=True, kw_only=True)
class Form:
    """One form of a pair. `name` is its format in a word, with the published one where a checkpoint has it."""

    pair: KnownPair
    name: str
    quantization: QuantizationConfig
    specs: PairSpecs
    plan: QuantizationPlan

    def config(self, num_ranks: int, *, backend: str = "torch") -> BuildConfig:
        """Experts are divided as a whole among several ranks: no block of a format is cut."""
        return BuildConfig(
            target=self.pair.target,
            drafter=self.pair.drafter,
            backend=backend,  # type: ignore[arg-type]
            quantization=self.quantization,
            tp_size=num_ranks,
            ep_size=num_ranks if self.has_experts else 1,
            max_batch_size=MAX_BATCH_SIZE,
            max_seq_len=min(MAX_SEQ_LEN, self.specs.target.max_position_embeddings),
        )

    def whole(self) -> PretrainedConfig:
        """The engine on one rank, whether a GPU holds it or not."""
        spec = self.plan.spec()
        quantization = None if spec.is_empty else spec
        return PretrainedConfig(
            target=self.specs.target, draft=self.specs.draft, dtype="bfloat16", quantization=quantization
        )

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.feed_forward, Moe) for layer in self.specs.target.layers)


def described_pairs() -> tuple[KnownPair, ...]:
    """Those that can be read; of the others no shape is known here."""
    return tuple(pair for pair in known_pairs() if pair.target in TARGETS and pair.needs is None)


def forms_of(pair: KnownPair, directory: Path) -> Iterator[Form]:
    """A target that is published in a format keeps it; from any other, FP8 and FP4 are made. Drafters keep theirs."""
    specs = read_specs(write_config(directory, pair.target), write_config(directory, pair.drafter))
    stored = sorted({found for name, found in specs.quantization.linears.items() if name.startswith("target.")})
    for name, asked in _ASKED.items():
        if stored and name != "bf16":
            return
        config = QuantizationConfig(target=asked, drafter="none")
        plan = make_plan(config, specs.target, specs.draft, specs.quantization)
        yield Form(pair=pair, name=", ".join(stored) or name, quantization=config, specs=specs, plan=plan)


def problems_of(form: Form, backend: str, num_ranks: int, gpu: Gpu) -> tuple[str, ...]:
    """What the back end says against this form on so many GPUs; the same about several layers once."""
    config = form.config(num_ranks, backend="torch" if backend == "cuda" else backend)
    target, draft, spec = form.specs.target, form.specs.draft, form.plan.spec()
    found = [*mapping_problems(target, draft, config.mapping), *sharding_problems(form.plan, config.mapping)]
    if backend == "cuda":
        assert gpu.capability is not None
        found += [*model_problems(target, draft), *format_problems(spec, gpu.capability)]
    else:
        found += backend_of(backend).unsupported(target, draft, spec, config.mapping)  # type: ignore[arg-type]
    if backend == "tensorrt_llm":
        found += config_problems(config)
    if backend == "tensorrt":
        found += _hardware_problems(form, gpu)
    return tuple(dict.fromkeys(_of_any_layer(text) for text in found))


def smallest_plan(form: Form, gpu: Gpu) -> EnginePlan | None:
    """The plan on the fewest GPUs of which each holds its share; None where the format is refused or none fits."""
    for num_ranks in RANKS:
        try:
            made = plan_engine(form.config(num_ranks), form.specs, gpu)
        except DFlashError:
            continue
        if made.fits:
            return made
    return None


def kind_of(form: Form) -> str:
    """What a target computes that others do not, by which tests are found."""
    layers = form.specs.target.layers
    attentions = form.specs.target.attentions
    if any(isinstance(layer.mixer, Mla) for layer in layers):
        return "latent attention"
    if any(isinstance(layer.mixer, GatedDelta) for layer in layers):
        return "gated delta nets"
    if any(gqa.has_v_norm for gqa in attentions):
        return "Gemma 4"
    if any(gqa.has_sinks for gqa in attentions):
        return "experts and sinks"
    if any(gqa.has_joint_qk_norm for gqa in attentions):
        return "experts and a norm over all heads"
    return "experts" if form.has_experts else "dense"


# Words of a kind's test models; drafters by their algorithm.
_WORDS: Mapping[str, str] = {
    "dense": r"make_target\(|make_pair\(|\"qwen3\"|\"llama\"",
    "experts": r"\bqwen3_moe\b",
    "experts and sinks": r"\bgpt_oss\b",
    "experts and a norm over all heads": r"\bminimax_m2\b",
    "gated delta nets": r"\bqwen3_5_(moe_)?text\b|\bqwen3_next\b",
    "latent attention": r"\bdeepseek_v3\b|\bkimi_k2\b",
    "Gemma 4": r"\bgemma4_text\b",
    "Llama 4": r"\bllama4_text\b",
    "drafter dflash2": r"dflash2",
    "drafter dspark": r"dspark",
    "drafter eagle3": r"eagle3",
    "drafter mtp": r"mtp_files",
}
# Files about one of them; and imports from such a file, which say nothing about the file that has them.
_OTHERS = re.compile("expert|hybrid|latent|gemma|llama4|delta|dflash2|dspark|eagle3|mtp|published")
_IMPORTS = re.compile(r"^from tests\.\w+\.test_\w+ import", re.MULTILINE)
# Where a back end's whole steps are compared with another's, or with transformers; and the names of tests there.
_PLACES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "torch, CPU": (("parity/test_*.py",), r"def test_\w*_(of|that)_(transformers|dflash|the_reference|speculators)"),
    "cuda": (("kernels/test_step_on_*.py",), ""),
    "TensorRT": (("trt/test_*steps*.py", "trt/test_step_tokens.py"), ""),
    "several ranks": (
        ("parity/test_*.py", "executor/test_*ranks*.py", "kernels/test_*ranks*.py", "trt/test_*ranks*.py"),
        r"def test_\w*(of_one_rank|two_ranks)",
    ),
    "weight formats": (
        ("checkpoint/test_*.py", "quantize/test_modelopt*.py"),
        r"def test_\w*(dequantize|decompress|modelopt|to_the_bit)",
    ),
    "TensorRT-LLM": (("compile/test_checkpoint_export.py", "compile/test_llm_args.py"), ""),
}


def proofs(tests: Path) -> dict[str, dict[str, tuple[str, ...]]]:
    """By kind and place, the test files whose source has a word of the kind; none where nothing proves it."""
    return {
        kind: {
            place: tuple(_files(tests, patterns, has, words, is_dense=kind == "dense"))
            for place, (patterns, has) in _PLACES.items()
        }
        for kind, words in _WORDS.items()
    }


def _files(tests: Path, patterns: tuple[str, ...], has: str, words: str, *, is_dense: bool) -> Iterator[str]:
    for path in (path for pattern in patterns for path in sorted(tests.glob(pattern))):
        text = _IMPORTS.sub("", path.read_text())
        if re.search(words, text) and re.search(has, text) and not (is_dense and _OTHERS.search(path.stem)):
            yield path.relative_to(tests).as_posix()


def _hardware_problems(form: Form, gpu: Gpu) -> Iterator[str]:
    assert gpu.capability is not None
    try:
        require_hardware(form.plan.formats, gpu.capability)
    except DFlashError as error:
        yield str(error)


def _of_any_layer(text: str) -> str:
    """A reason without the numbers in which layers, and models of a family, differ."""
    text = re.sub(r"\blayer(s?[. ])\d+", r"layer\1N", text)
    text = re.sub(r"found \d+ (?=layers|gated)", "found ", text)
    return re.sub(r" and \d+ more\b", " and others", text)
