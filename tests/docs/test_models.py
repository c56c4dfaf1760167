"""docs/models.md against the back ends and the published shapes."""

import math
import re
from pathlib import Path

import pytest

from dflash_trt.backends.base import backend_of
from dflash_trt.core.known_pairs import known_pairs, pairs_of_target
from scripts.models_table import page, support_rows
from scripts.pair_support import GPUS, Form, described_pairs, forms_of, problems_of, proofs
from scripts.published_shapes import ASSUMED, DRAFTERS
from tests.docs.pages import ROOT, Page
from tests.published_pairs import needs_published_configs

MODELS = Page.read("docs/models.md")
# Billions of parameters by the name of a target that does not say them, from the cards.
BILLIONS = {"Qwen3-Coder-Next": 80, "MiniMax-M2.5": 229, "MiniMax-M2.7": 229, "Kimi-K2.5": 1026, "Kimi-K2.6": 1026}


def forms(target: str, directory: Path) -> list[Form]:
    return list(forms_of(pairs_of_target(target)[0], directory))


@needs_published_configs
def test_the_page_is_what_the_back_ends_say_now() -> None:
    assert page() == MODELS.text, "run `python -m scripts.models_table`"


def test_every_known_pair_has_a_row_or_the_reason_why_not() -> None:
    listed = set(re.findall(r"\]\(https://huggingface\.co/([\w./-]+)\)", MODELS.text))
    assert listed == {pair.target for pair in known_pairs()} and len(known_pairs()) == 46
    assert DRAFTERS.keys() >= ASSUMED.keys()


def test_a_back_end_that_refuses_more_is_another_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bf16, *_) = forms("Qwen/Qwen3-8B", tmp_path)
    reasons: dict[str, str] = {}
    (row,) = support_rows([bf16], reasons)
    assert row[4:] == ("1 to 8",) * 6 and not reasons
    monkeypatch.setattr(type(backend_of("torch")), "unsupported", lambda *_: ["layers.3: expected x, found y."])
    (row,) = support_rows([bf16], reasons)
    assert row[4:] == ("no (a)", *["1 to 8"] * 5) and reasons == {"layers.N: expected x, found y.": "a"}


def test_a_format_and_a_number_of_ranks_count(tmp_path: Path) -> None:
    h200, b300 = GPUS
    found = {form.name: form for form in forms("google/gemma-4-26B-A4B-it", tmp_path)}
    assert problems_of(found["bf16"], "torch", 8, h200) == ()
    (cut,) = problems_of(found["FP4"], "torch", 8, h200)
    assert cut.startswith("target.layers.N.shared.down: expected input features per rank in blocks of 16 for nvfp4")
    (dense,) = (form for form in forms("Qwen/Qwen3-8B", tmp_path) if form.name == "FP4")
    assert not problems_of(dense, "cuda", 1, b300) and "capability" in problems_of(dense, "cuda", 1, h200)[0]


@pytest.mark.parametrize("target", [pair.target for pair in described_pairs()])
def test_published_shapes_have_as_many_parameters_as_their_names_say(target: str, tmp_path: Path) -> None:
    (form, *_) = forms(target, tmp_path)
    count = sum(math.prod(spec.shape) for spec in form.specs.target.weights().values())
    name = target.partition("/")[2]
    said = BILLIONS.get(name) or int(re.search(r"-(\d+)[bB]\b", name)[1])
    assert count / 1e9 == pytest.approx(said, rel=0.06)


def test_proofs_are_found_by_what_files_have(tmp_path: Path) -> None:
    places = {"parity": "test_hybrids.py", "kernels": "test_step_on_hybrids.py"}
    for folder, name in places.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(
            'FAMILY = "qwen3_next"\n\ndef test_tokens_are_those_of_transformers(): ...\n'
        )
    found = proofs(tmp_path)
    assert found["gated delta nets"]["torch, CPU"] == ("parity/test_hybrids.py",)
    assert found["gated delta nets"]["cuda"] == ("kernels/test_step_on_hybrids.py",)
    assert found["gated delta nets"]["TensorRT"] == found["experts"]["torch, CPU"] == ()
    real = proofs(ROOT / "tests")
    assert all(of_kind["torch, CPU"] for of_kind in real.values()), "every kind is proven on the CPU"
