"""The soak test of `scripts/soak.py` over an engine in PyTorch and the same one in TensorRT, interpreted."""

from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest

from dflash_trt import LLM
from scripts.soak import Traffic, soak
from tests.engine_dir.building import build
from tests.factories import make_target, make_zlab_drafter
from tests.trt.engines import interpreted_engines

VOCAB_SIZE = 40
# More than either computes, so that requests wait, run together and run out of pages.
TRAFFIC = Traffic(duration_s=3.0, mean_gap_s=0.02, max_prompt_tokens=40, max_new_tokens=16)
LIMITS = {"max_seq_len": 96, "max_batch_size": 4, "max_num_tokens": 64, "page_size": 4}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    target = make_target(root / "target", vocab_size=VOCAB_SIZE, tokenizer=False)
    make_zlab_drafter(root / "drafter", target_dir=target, block_size=4)
    return build(root, root / "engine", drafter="drafter", **LIMITS).path


@pytest.mark.parametrize("is_interpreted", [False, True])
def test_random_traffic_loses_no_page_and_no_request(trt: ModuleType, engine: Path, is_interpreted: bool) -> None:
    options = {"device": "cpu", "kv_cache_bytes": 1 << 18, "num_threads": 1, "max_queue_len": 16}
    with interpreted_engines() if is_interpreted else nullcontext(), LLM(engine, **options) as llm:
        report = soak(llm, VOCAB_SIZE, TRAFFIC)
    assert report.num_leaked_pages == 0
    assert sum(report.num_by_outcome.values()) == report.num_sent > 20
    assert report.num_by_outcome["cancelled"] > 0 and report.num_by_outcome["length"] > 0
