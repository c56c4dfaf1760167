"""Kernels of a user's engine against the CPU, at its sizes: scripts/test_cuda runs it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

if os.environ.get("SOFTWARE_GPU_EXECUTES") != "1":
    pytest.skip("needs PyTorch's CUDA build on a GPU made of software: scripts/test_cuda", allow_module_level=True)

from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.demo import PROMPTS
from dflash_trt.engine_dir import EngineDir
from software_gpu.verification import verify
from software_gpu.verification.cut import Cut, write_cut

DEMO = PROMPTS.parent


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    config = BuildConfig(target=str(DEMO / "target"), drafter=str(DEMO / "drafter"), dtype="float32", max_seq_len=256)
    path = tmp_path_factory.mktemp("demo") / "engine"
    return build_engine(config, path, base_dir=DEMO, overwrite=False, command=("build",), progress=lambda _: None)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "PROMPT_LENS", (5,))
    monkeypatch.setattr(verify, "NUM_VERIFY_STEPS", 2)
    monkeypatch.setenv("SOFTWARE_GPU_LATE", "1")


def test_layers_that_are_left_keep_their_sizes_and_weights(engine: EngineDir, tmp_path: Path) -> None:
    small, cut = write_cut(engine, tmp_path)
    target, draft = engine.manifest.target, engine.manifest.draft
    assert draft is not None and set(draft.target_layer_ids) <= set(cut.target)
    assert [small.manifest.target.layers[i] for i in range(len(cut.target))] == [target.layers[i] for i in cut.target]
    assert len(cut.target) < target.num_layers and len(cut.draft) < draft.num_layers
    assert Cut.of(small.manifest.pretrained_config) == Cut(target=tuple(range(len(cut.target))), draft=(0,))


def test_an_engine_is_verified(engine: EngineDir) -> None:
    report = verify.verified(engine.path)
    assert verify.missed(report) == []
    assert report["tokens"] == report["equal_tokens"] >= 6
    assert report["drafts"] == report["equal_drafts"] == 6 * 7
    assert any("attention" in name for name in report["launches"])


def test_one_number_that_a_kernel_reads_wrongly_is_noticed(engine: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    right = verify.open_executor

    def spoilt(*arguments: Any) -> Any:
        executor = right(*arguments)
        if arguments[1].device == "cuda":
            with torch.inference_mode():
                executor.network.target_weights.norm[3] *= 8
            torch.cuda.synchronize()
        return executor

    monkeypatch.setattr(verify, "open_executor", spoilt)
    assert any("logits differ" in line for line in verify.missed(verify.verified(engine.path)))
