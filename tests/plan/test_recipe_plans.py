"""Every recipe, from config.json files alone: planned on its GPUs, refused by none, and checked by TensorRT-RTX."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash_trt.backends.cuda.backend import format_problems, model_problems
from dflash_trt.backends.tensorrt.support import unsupported_problems
from dflash_trt.checkpoint.specs import PairSpecs, read_specs
from dflash_trt.cli.yaml_file import read_yaml
from dflash_trt.compile.tensorrt_check import check_config
from dflash_trt.core.config import BuildConfig, build_config_from
from dflash_trt.core.errors import BuildError
from dflash_trt.plan.gpus import gpu_of
from dflash_trt.plan.planning import plan_engine
from dflash_trt.recipes import Recipe, recipes
from scripts.pair_support import GPUS, described_pairs, forms_of, problems_of, smallest_plan
from scripts.published_shapes import write_config
from scripts.write_recipes import files

PUBLISHED = [recipe for recipe in recipes() if recipe.name != "demo"]


@dataclass(frozen=True, kw_only=True)
class Read:
    recipe: Recipe
    config: BuildConfig
    base_dir: Path
    pair: PairSpecs


@pytest.fixture(params=PUBLISHED, ids=lambda recipe: recipe.name)
def read(request: pytest.FixtureRequest, tmp_path: Path) -> Read:
    """A recipe beside the configs of its pair, which have the published shapes."""
    recipe = request.param
    config = build_config_from(read_yaml(recipe.path), source=recipe.name)
    target, drafter = (write_config(tmp_path, name) for name in (config.target, config.drafter))
    return Read(recipe=recipe, config=config, base_dir=tmp_path, pair=read_specs(target, drafter))


def test_a_recipe_is_planned_with_room_and_opens_on_its_gpus(read: Read) -> None:
    for gpu in map(gpu_of, read.recipe.gpus):
        made = plan_engine(read.config, read.pair, gpu)
        assert made.fits and made.max_requests(8192) >= 16, gpu.name
        assert not [note for note in made.notes if "refused" in note]
        assert not list(model_problems(read.pair.target, read.pair.draft))
        quantization = made.pretrained_config.quantization
        assert gpu.capability is not None
        assert quantization is None or not list(format_problems(quantization, gpu.capability))
        weights_gib = made.memory.weights_bytes * read.config.tp_size / 2**30
        assert weights_gib == pytest.approx(read.recipe.weights_gib, abs=0.06)
    smaller = gpu_of(str(read.recipe.weights_gib / read.config.tp_size))
    assert not plan_engine(read.config, read.pair, smaller).fits, "a GPU of the size of the weights"


def test_written_recipes_are_what_the_script_writes_now() -> None:
    stale = [path.name for path, text in files().items() if not path.exists() or path.read_text() != text]
    assert stale == [], "run `python -m scripts.write_recipes`"


def test_every_pair_has_a_recipe_for_each_gpu_that_holds_it(tmp_path: Path) -> None:
    """With its default drafter, as docs/models.md says of the unquantized checkpoint, or of a published format."""
    gpus_of = {str(read_yaml(recipe.path)["drafter"]): set[str]() for recipe in PUBLISHED}
    for recipe in PUBLISHED:
        gpus_of[str(read_yaml(recipe.path)["drafter"])] |= {name.lower() for name in recipe.gpus}
    held = 0
    for pair in (pair for pair in described_pairs() if pair.is_default):
        form = next(forms_of(pair, tmp_path))
        for gpu in GPUS:
            made = smallest_plan(form, gpu)
            if made is not None and not problems_of(form, "cuda", made.pretrained_config.mapping.tp_size, gpu):
                assert gpu.name in gpus_of[pair.drafter], (pair.target, gpu.name)
                held += 1
    assert held > 40


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_recipe_is_checked_by_tensorrt_or_refused_by_name(read: Read) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: pip install 'dflash-trt[check]'")
    config = read.config.model_copy(update={"target": str(read.base_dir / read.config.target)})
    config = config.model_copy(update={"drafter": str(read.base_dir / str(read.config.drafter))})
    pair = read.pair
    problems = unsupported_problems(pair.target, pair.draft, pair.quantization, config.dtype, config.mapping)
    if problems:
        with pytest.raises(BuildError, match="backend tensorrt"):
            check_config(config, base_dir=read.base_dir)
        return
    report = check_config(config, base_dir=read.base_dir)
    assert report.built[0].num_layers > 0 and report.num_layers["target"] == read.pair.target.num_layers
    weights_gib = report.sizes.weights_bytes * config.tp_size / 2**30
    assert weights_gib == pytest.approx(read.recipe.weights_gib, rel=0.01, abs=0.06)
