"""Gemma 4 as published tools quantize it, in TensorRT: its network, interpreted, gives the torch backend's tokens."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from dflash_trt.backends.torch.native.library import NoKernels
from tests.checkpoint.quantized_gemma import make_quantized_gemma
from tests.executor.rank_engines import build, opened
from tests.factories import make_zlab_drafter
from tests.traces import GREEDY, integers, logprobs, trace
from tests.trt.host_memory import view_at
from tests.trt.networks import InterpretedExecutor, define_engine
from tests.trt.ranks import interpreted_engine

K, NUM_PAGES, KV_CACHE_BYTES = 3, 128, 1 << 24
FORMATS = ["FP8_DYNAMIC", *(pytest.param(name, marks=pytest.mark.slow) for name in ("NVFP4", "INT4 g32"))]


@pytest.mark.parametrize("name", FORMATS)
def test_every_step_of_a_trace_equals_torchs(
    trt: ModuleType, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts, too: the CPU kernels, which round what the drafter reads where that is fast, may give others."""
    monkeypatch.setattr("dflash_trt.backends.torch.executor.cpu_kernels", lambda: NoKernels("not wanted"))
    target = make_quantized_gemma(tmp_path, name)
    make_zlab_drafter(tmp_path / "drafter", target_dir=target, num_layers=1, target_layer_ids=(0,), head_dim=16)
    engine = build(tmp_path, tp_size=1)
    with opened(engine, kv_cache_bytes=KV_CACHE_BYTES) as executor:
        expected = trace(executor, GREEDY, num_draft_tokens=(K,))[0]
    defined = define_engine(trt, engine)
    found = trace(InterpretedExecutor(defined, num_pages=NUM_PAGES), GREEDY, num_draft_tokens=(K,))[0]
    assert integers(found) == integers(expected)
    torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-4)
    if name == "FP8_DYNAMIC":
        two = interpreted_engine(trt, build(tmp_path, tp_size=2), num_pages=NUM_PAGES)
        found = trace(two, GREEDY, num_draft_tokens=(K,))[0]
        assert integers(found) == integers(expected)
    [down] = [host for host in defined.layers.constant_owners if host.name.endswith("layers.1.experts.down")]
    codes = view_at(down.address, down.shape, torch.uint8)
    codes.copy_(codes.flip(0))  # the negative control
    other = trace(InterpretedExecutor(defined, num_pages=NUM_PAGES), GREEDY, num_draft_tokens=(K,), num_new=1)[0]
    assert (logprobs(other[:1]) - logprobs(expected[:1])).abs().max() > 5e-4
