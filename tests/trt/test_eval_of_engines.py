"""`dflash-trt eval` of TensorRT engines: their own log probabilities, against the logits of backend torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: pip install 'dflash-trt[check]'")

from dflash_trt.backends.torch.backend import TorchBackend
from dflash_trt.bench.comparison import Comparison
from dflash_trt.cli.eval import _measure
from dflash_trt.cli.prompts import Job
from dflash_trt.core.request import SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from tests.engine_dir.building import build
from tests.factories import make_target, make_zlab_drafter
from tests.trt.engines import open_interpreted

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [100, 90, 80, 70], [33]]
NUM_NEW, MAX_SEQ_LEN = 8, 15  # the first text fills it


def test_a_tensorrt_engine_is_scored_by_what_it_gives_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its distributions, in 4 bits, are those of backend torch, of which eval reads the logits."""
    target = make_target(tmp_path / "target", tokenizer=False)
    make_zlab_drafter(tmp_path / "drafter", target_dir=target)
    sizes = {"drafter": "drafter", "max_seq_len": MAX_SEQ_LEN}
    baseline = build(tmp_path, tmp_path / "plain", **sizes)
    candidate, same = (
        build(tmp_path, tmp_path / name, quantization={"target": "nvfp4_w4a16"}, **sizes) for name in ("packed", "same")
    )
    expected = measured(candidate, baseline)
    assert expected.kl_num_top is None

    def open_engine(self: TorchBackend, engine: EngineDir, *given: Any, **named: Any) -> Any:
        if engine.path == candidate.path:
            return open_interpreted(engine, *given, **named)
        return open_torch(self, engine, *given, **named)

    open_torch = TorchBackend.open
    monkeypatch.setattr(TorchBackend, "open", open_engine)
    compiled = replace(candidate, manifest=candidate.manifest.model_copy(update={"backend": "tensorrt"}))
    found = measured(compiled, baseline)
    for name in ("num_generated_positions", "num_prompt_positions", "token_agreement_fraction", "baseline_perplexity"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.num_generated_positions == len(PROMPTS) * NUM_NEW and found.kl_num_top == 20
    assert found.candidate_perplexity == pytest.approx(expected.candidate_perplexity, rel=1e-5)
    assert 0 < found.kl_nats < expected.kl_nats
    itself = measured(compiled, same)
    assert abs(itself.kl_nats or 0.0) < 1e-6 < found.kl_nats


def measured(candidate: EngineDir, baseline: EngineDir) -> Comparison:
    sampling = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    jobs = [Job(row_id=str(i), prompt=prompt, sampling=sampling) for i, prompt in enumerate(prompts)]
    return _measure({"candidate": candidate, "baseline": baseline}, jobs, RuntimeConfig(device="cpu"))
