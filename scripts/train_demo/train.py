"""`python -m scripts.train_demo.train`: from source files to a target and a drafter, stage by stage.

A stage whose output already exists is skipped, so an interrupted run goes on where it stopped. It refuses to hold any
recipe: those stand in the modules it calls.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from scripts.train_demo.corpus import END_OF_TEXT, MASK, Corpus, standard_library, token_rows, train_tokenizer
from scripts.train_demo.evaluate import evaluate_drafter
from scripts.train_demo.responses import ResponseRecipe, Responses, distinct_fraction, generate_responses
from scripts.train_demo.train_drafter import DrafterRecipe, load_drafter, save_drafter, train_drafter
from scripts.train_demo.train_target import TargetRecipe, save_target, train_target, with_vocabulary
from scripts.train_demo.unlikelihood import UnlikelihoodRecipe, unlearn_repetition

_NUM_HELD_OUT_RESPONSES = 128


@dataclass(frozen=True, kw_only=True)
class Recipes:
    target: TargetRecipe
    unlikelihood: UnlikelihoodRecipe
    responses: ResponseRecipe
    drafter: DrafterRecipe


@dataclass(frozen=True)
class Stages:
    """Where each stage leaves its output."""

    output: Path

    @property
    def target(self) -> Path:
        return self.output / "target"

    @property
    def drafter(self) -> Path:
        return self.output / "drafter"

    @property
    def rows(self) -> Path:
        return self.output / "intermediate" / "rows.npy"

    @property
    def tokenizer(self) -> Path:
        return self.output / "intermediate" / "tokenizer.json"

    @property
    def responses(self) -> Path:
        return self.output / "intermediate" / "responses.npz"

    @property
    def held_out_responses(self) -> Path:
        return self.output / "intermediate" / "held_out_responses.npz"


@click.command()
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), required=True, help="Directory to fill.")
@click.option(
    "--initial",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Directory with an earlier `target` and `drafter` to train further, instead of starting at random.",
)
@click.option("--target-tokens", default=TargetRecipe.num_tokens, show_default=True, help="The target is trained on.")
@click.option(
    "--unlikelihood-steps", default=UnlikelihoodRecipe.num_steps, show_default=True, help="Of each run against loops."
)
@click.option("--num-responses", default=ResponseRecipe.num_sequences, show_default=True, help="Written by the target.")
@click.option("--drafter-steps", default=DrafterRecipe.num_steps, show_default=True, help="Its optimizer steps.")
@click.option("--threads", default=0, help="CPU threads; 0 leaves PyTorch's choice.")
@click.option("--seed", default=0, show_default=True)
def main(
    output: Path,
    initial: Path | None,
    target_tokens: int,
    unlikelihood_steps: int,
    num_responses: int,
    drafter_steps: int,
    threads: int,
    seed: int,
) -> None:
    """Train the demo target and its DFlash2 drafter on the standard library's source code."""
    if threads:
        torch.set_num_threads(threads)
    recipes = Recipes(
        target=TargetRecipe(num_tokens=target_tokens, seed=seed),
        unlikelihood=UnlikelihoodRecipe(num_steps=unlikelihood_steps, seed=seed),
        responses=ResponseRecipe(num_sequences=num_responses, seed=seed),
        drafter=DrafterRecipe(num_steps=drafter_steps, seed=seed),
    )
    if initial is not None:
        recipes = _gentler(recipes)
    train_pair(Stages(output), recipes, standard_library(), initial=initial, report=_timed_report())


def _gentler(recipes: Recipes) -> Recipes:
    """For models that do not start at random."""
    return replace(
        recipes,
        target=replace(recipes.target, matrix_lr=2.5e-3, vector_lr=2e-3),
        drafter=replace(recipes.drafter, matrix_lr=2.5e-3, vector_lr=2e-3),
    )


def train_pair(
    stages: Stages, recipes: Recipes, corpus: Corpus, *, initial: Path | None = None, report: Callable[[str], None]
) -> None:
    stages.rows.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(stages, recipes, corpus, report)
    rows = _rows(stages, recipes, corpus, tokenizer, report)
    target = _target(stages, recipes, tokenizer, rows, initial, report)
    end_id = tokenizer.token_to_id(END_OF_TEXT)
    responses = _responses(stages.responses, target, rows, recipes.responses, end_id=end_id, report=report)
    held_out_rows = token_rows(tokenizer, corpus.held_out, seq_len=rows.shape[1], seed=recipes.responses.seed)
    held_out_recipe = replace(
        recipes.responses, num_sequences=_NUM_HELD_OUT_RESPONSES, sampled_fraction=0.0, batch_size=32
    )
    held_out = _responses(
        stages.held_out_responses, target, held_out_rows, held_out_recipe, end_id=end_id, report=report
    )
    report(f"held-out responses: {distinct_fraction(held_out):.3f} of their 4-grams are distinct")
    if stages.drafter.exists():
        report(f"{stages.drafter} exists: skipped")
        return
    recipe = replace(recipes.drafter, mask_token_id=tokenizer.token_to_id(MASK))
    earlier = None if initial is None else load_drafter(initial / "drafter", target, recipe)
    drafter = train_drafter(target, responses, recipe, initial=earlier, report=report)
    with _whole(stages.drafter) as partial:
        save_drafter(drafter, target.config, recipe, partial)
    report(f"saved {stages.drafter}; on held-out responses: {evaluate_drafter(drafter, target, held_out, recipe)}")


def _tokenizer(stages: Stages, recipes: Recipes, corpus: Corpus, report: Callable[[str], None]) -> Tokenizer:
    if not stages.tokenizer.exists():
        report(f"tokenizer on {len(corpus.train)} files; {len(corpus.held_out)} files are held out")
        train_tokenizer(corpus.train, vocab_size=recipes.target.vocab_size).save(str(stages.tokenizer))
    return Tokenizer.from_file(str(stages.tokenizer))


def _rows(
    stages: Stages, recipes: Recipes, corpus: Corpus, tokenizer: Tokenizer, report: Callable[[str], None]
) -> NDArray[np.int64]:
    if not stages.rows.exists():
        seq_len, seed = recipes.target.seq_len, recipes.target.seed
        np.save(stages.rows, token_rows(tokenizer, corpus.train, seq_len=seq_len, seed=seed))
    rows: NDArray[np.int64] = np.load(stages.rows)
    report(f"corpus: {rows.size / 1e6:.1f} million tokens in rows of {rows.shape[1]}")
    return rows


def _target(
    stages: Stages,
    recipes: Recipes,
    tokenizer: Tokenizer,
    rows: NDArray[np.int64],
    initial: Path | None,
    report: Callable[[str], None],
) -> Qwen3ForCausalLM:
    """Read back from the file, so that a resumed run has the very weights of an uninterrupted one.

    In bfloat16 where the machine computes in it: a CPU without such instructions is seven times slower than in float32.
    """
    if stages.target.exists():
        report(f"{stages.target} exists: skipped")
    else:
        earlier = None if initial is None else with_vocabulary(initial / "target", tokenizer, recipes.target)
        trained = train_target(rows, recipes.target, initial=earlier, report=report)
        unlearn_repetition(trained, rows, recipes.unlikelihood, report=report)
        with _whole(stages.target) as partial:
            save_target(trained, tokenizer, partial)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    is_fast = device == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtype = torch.bfloat16 if is_fast else torch.float32
    target: Any = Qwen3ForCausalLM.from_pretrained(stages.target, dtype=dtype)
    frozen: Qwen3ForCausalLM = target.to(device).eval().requires_grad_(False)
    return frozen


def _responses(
    path: Path,
    target: Qwen3ForCausalLM,
    rows: NDArray[np.int64],
    recipe: ResponseRecipe,
    *,
    end_id: int,
    report: Callable[[str], None],
) -> Responses:
    if not path.exists():
        generate_responses(target, rows, recipe, end_id=end_id, report=report).save(path)
    return Responses.load(path)


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A directory to write into; it takes its name only when the writing has gone well."""
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    partial.rename(path)


def _timed_report() -> Callable[[str], None]:
    start_s = time.monotonic()
    return lambda line: click.echo(f"[{time.monotonic() - start_s:6.0f} s] {line}")


if __name__ == "__main__":
    main()
