"""Writes the recipes of pairs that have none written by hand: `python -m scripts.write_recipes`.

A pair has recipes when its family is read and the GPU backend refuses nothing of it: one for each GPU, H200 and B300,
or one for both where they take as many ranks, the fewest that hold the weights and 16 requests of 8192 tokens. Steps
of fewer tokens, whose activations take less, are for pairs that eight GPUs do not hold otherwise. Run it after a
backend has learned something; tests/plan/test_recipe_plans.py finds what is missing. It also writes into every recipe,
those written by hand too, which K its GPUs are planned to be fastest with.
"""

import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from dflash_trt.checkpoint.specs import PairSpecs, read_specs
from dflash_trt.cli.yaml_file import read_yaml
from dflash_trt.compile.description import describe_engine
from dflash_trt.core.config import BuildConfig, build_config_from
from dflash_trt.core.draft_lengths import lengths_text
from dflash_trt.core.errors import DFlashError
from dflash_trt.engine_dir.manifest import rank_weight_bytes
from dflash_trt.plan.gpus import Gpu, gpu_of
from dflash_trt.plan.kernel_fits import FittedKernels
from dflash_trt.plan.planning import plan_engine
from dflash_trt.plan.step_costs import StepClock, assumed_costs
from dflash_trt.recipes import Recipe, recipes
from dflash_trt.simulation.acceptance import AcceptanceByPosition
from dflash_trt.simulation.advice import Layout
from dflash_trt.simulation.load import Lengths
from scripts.pair_support import GPUS, RANKS, Form, described_pairs, forms_of, problems_of
from scripts.published_shapes import write_config

RECIPES = Path(__file__).resolve().parents[1] / "dflash_trt" / "recipes"
MARK = "# From here on written by scripts/write_recipes.py."
BY_HAND = (
    "Qwen3-4B",
    "Qwen3-8B",
    "Llama-3.1-8B-Instruct",
    "Qwen3-Coder-30B-A3B-Instruct",
    "gpt-oss-20b",
    "gpt-oss-120b",
)
_REQUESTS, _CONTEXT_LEN, _MAX_SEQ_LEN = 16, 8192, 131072
_SPARE_BYTES = 2 << 30  # for what no plan counts: NCCL's buffers, and blocks that PyTorch's allocator keeps
_MAX_NUM_TOKENS = (4096, 2048)  # of which the first is tried with all numbers of ranks before the second
_NUMBERS = {1: "one", 2: "two", 4: "four", 8: "eight"}
# By the format of most weights: the end of a name, and words.
_FORMATS = {
    "bf16": ("bf16", "bfloat16", "in bfloat16"),
    "fp8_block": ("fp8", "fp8_block", "in FP8 as published (blocks of 128 x 128), its drafter in bfloat16"),
    "int4": ("int4", "int4", "with its experts in INT4 as published, all else in bfloat16"),
}


_ACCEPTED = 0.8
_DRAFTS = f"# --draft-length by plan, where {_ACCEPTED:.0%} of drafts are accepted after an accepted one:"


@dataclass(frozen=True, kw_only=True)
class Written:
    """A recipe as files have it. `entry` is its section of recipes.toml."""

    name: str
    text: str
    entry: str


def written_recipes() -> list[Written]:
    """In the order of known_pairs.toml."""
    with tempfile.TemporaryDirectory() as directory:
        pairs = [pair for pair in described_pairs() if pair.is_default and pair.target.partition("/")[2] not in BY_HAND]
        return [
            recipe
            for pair in pairs
            if pair.needs is None
            for recipe in _recipes_of(next(forms_of(pair, Path(directory))))
        ]


def _recipes_of(form: Form) -> Iterator[Written]:
    configs = [(gpu, config) for gpu in GPUS if (config := _smallest(form, gpu)) is not None]
    if len(configs) == len(GPUS) and all(config == configs[0][1] for _, config in configs):
        yield _written(form, GPUS, configs[0][1], suffix="")
        return
    for gpu, config in configs:
        yield _written(form, (gpu,), config, suffix=f"-{gpu.name}")


def _smallest(form: Form, gpu: Gpu) -> BuildConfig | None:
    """That of the fewest ranks; None where the GPU backend refuses, or eight GPUs are too few."""
    for max_num_tokens, num_ranks in product(_MAX_NUM_TOKENS, RANKS):
        if problems_of(form, "cuda", num_ranks, gpu):
            continue
        config = _config(form, num_ranks, max_num_tokens)
        try:
            made = plan_engine(config, form.specs, gpu)
        except DFlashError:
            continue
        has_room = made.fits and made.left_bytes >= _SPARE_BYTES
        if has_room and made.max_requests(_CONTEXT_LEN) >= _REQUESTS:
            return config
    return None


def _config(form: Form, num_ranks: int, max_num_tokens: int) -> BuildConfig:
    return BuildConfig(
        target=form.pair.target,
        drafter=form.pair.drafter,
        tp_size=num_ranks,
        ep_size=num_ranks if form.has_experts else 1,
        max_num_tokens=max_num_tokens,
        max_seq_len=min(_MAX_SEQ_LEN, form.specs.target.max_position_embeddings),
    )


def _written(form: Form, gpus: tuple[Gpu, ...], config: BuildConfig, *, suffix: str) -> Written:
    end, stored, words = _FORMATS[form.name]
    num_ranks, target = config.tp_size, form.pair.target.partition("/")[2]
    name = f"{target.removesuffix('-it').lower()}-{end}{suffix}"
    devices = " or ".join(gpu.name.upper() for gpu in gpus)
    lines = [
        f"# {target} {words}, on {_NUMBERS[num_ranks]} {devices}.",
        _draft_lengths(config, form.specs, gpus),
        f"target: {config.target}",
        f"drafter: {config.drafter}",
        f"dtype: {config.dtype}",
        "",
        *([f"tp_size: {num_ranks}"] if num_ranks > 1 else []),
        *([f"ep_size: {num_ranks} # each rank has whole experts"] if config.ep_size > 1 else []),
        f"max_batch_size: {config.max_batch_size}",
        f"max_num_tokens: {config.max_num_tokens}",
        f"max_seq_len: {config.max_seq_len}",
    ]
    listed = ", ".join(f'"{gpu.name.upper()}"' for gpu in gpus)
    entry = [f'["{name}"]', f'format = "{stored}"', f"gpus = [{listed}]", f"weights_gib = {_weights_gib(form, config)}"]
    return Written(name=name, text="\n".join(lines) + "\n", entry="\n".join(entry) + "\n")


def _draft_lengths(config: BuildConfig, specs: PairSpecs, gpus: Iterable[Gpu]) -> str:
    """A comment with K by requests on each GPU."""
    found = []
    for gpu in gpus:
        made = plan_engine(config, specs, gpu)
        layout = Layout(
            made=made,
            clock=StepClock(gpu, assumed_costs(gpu), [FittedKernels(gpu)]),
            acceptance=AcceptanceByPosition(tuple(_ACCEPTED**i for i in range(1, made.build_config.max_draft_len + 1))),
            lengths=Lengths(num_prompt_tokens=1024, num_output_tokens=256),
            num_replicas=1,
            format=None,
        )
        found.append(f"{lengths_text(layout.draft_lengths())} on {gpu.name.upper()}")
    return f"{_DRAFTS} {'; '.join(dict.fromkeys(found))}."


def _with_draft_lengths(recipe: Recipe, root: Path) -> str:
    """The text of a recipe that is written by hand, with its comment anew."""
    config = build_config_from(read_yaml(recipe.path), source=recipe.name)
    specs = read_specs(*(write_config(root, name) for name in (config.target, str(config.drafter))))
    lines = [line for line in recipe.path.read_text().splitlines() if not line.startswith(_DRAFTS)]
    first = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    lines.insert(first, _draft_lengths(config, specs, map(gpu_of, recipe.gpus)))
    return "\n".join(lines) + "\n"


def _weights_gib(form: Form, config: BuildConfig) -> float:
    described = describe_engine(config, form.specs, unsupported=lambda *_: [], subject="recipe", capability=None)
    by_model = rank_weight_bytes(described.pretrained_config).values()
    return round(sum(sum(by_format.values()) for by_format in by_model) * config.tp_size / 2**30, 1)


def files() -> dict[Path, str]:
    """The files by path, recipes.toml among them."""
    made = written_recipes()
    table = RECIPES / "recipes.toml"
    by_hand = table.read_text().partition(MARK)[0].rstrip()
    entries = "\n".join(recipe.entry for recipe in made)
    texts = {RECIPES / f"{recipe.name}.yaml": recipe.text for recipe in made}
    with tempfile.TemporaryDirectory() as directory:
        others = [recipe for recipe in recipes() if recipe.path not in texts and recipe.name != "demo"]
        texts |= {recipe.path: _with_draft_lengths(recipe, Path(directory)) for recipe in others}
    return texts | {table: f"{by_hand}\n\n{MARK}\n\n{entries}"}


def main() -> int:
    for path, text in files().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"{path.name}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
