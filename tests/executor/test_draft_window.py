"""`draft_window`: the tokens of context that a drafter sees, chosen at the build or when an engine is opened."""

from pathlib import Path

import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.checkpoint.specs import with_draft_window
from dflash_trt.core.config import build_config_from
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.core.runtime_config import RuntimeConfig, SettingError
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.opening import resolved_config
from tests.engine_dir.building import build
from tests.factories import make_target, make_zlab_drafter

PROMPT = [4 + 7 * i % 50 for i in range(40)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("engines")
    target = make_target(root / "target", tokenizer=False)
    options = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 20}
    make_zlab_drafter(root / "drafter", target_dir=target, **options)
    limits = {"page_size": 4, "max_seq_len": 96, "max_num_tokens": 16, "max_batch_size": 16}
    build(root, root / "engine", drafter="drafter", **limits)
    build(root, root / "narrow", drafter="drafter", draft_window=9, **limits)
    build(root, root / "two ranks", drafter="drafter", tp_size=2, **limits)
    build(root, root / "alone", **limits)
    return root


def masks_of(engine: EngineDir) -> list[AttentionMask]:
    assert engine.manifest.draft is not None
    return [gqa.mask for gqa in engine.manifest.draft.attentions]


def test_a_window_of_the_build_narrows_every_layer(root: Path) -> None:
    """A layer without a window gets one before the anchor, another keeps what its own counts from."""
    anchored = AttentionMask(window=9, is_causal=False, is_window_anchored=True)
    assert masks_of(EngineDir.open(root / "narrow")) == [anchored, AttentionMask(window=9)]
    engine = EngineDir.open(root / "engine")
    assert masks_of(engine.with_draft_window(30))[1] == masks_of(engine)[1], "a smaller window stays"
    assert masks_of(engine.with_draft_window(None)) == masks_of(engine)


def test_the_same_window_of_the_run_bounds_the_pages_and_changes_no_token(root: Path) -> None:
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True)
    texts, pages = [], []
    for name, window, windows in (
        ("engine", None, []),
        ("engine", 9, [9]),
        ("narrow", None, [9]),
        ("two ranks", 9, [9]),
    ):
        with LLM(root / name, draft_window=window, device="cpu", kv_cache_bytes=1 << 20) as llm:
            assert [group.window for group in llm.page_plan.page_windows] == windows
            texts.append(llm.generate(PROMPT, sampling).token_ids)
            pages.append(llm.page_plan)
    assert texts[0] == texts[1] == texts[2] == texts[3] and len(set(texts[0])) > 2
    assert pages[1] == pages[2]
    assert pages[1].num_full_sequences > pages[0].num_full_sequences


def test_engines_that_have_no_drafter_or_masks_of_their_own_refuse_it(root: Path) -> None:
    config = RuntimeConfig(draft_window=9, device="cpu")
    with pytest.raises(SettingError, match="draft_window: expected an engine with a drafter"):
        resolved_config(EngineDir.open(root / "alone"), config)
    with pytest.raises(ConfigError, match="draft_window: expected a drafter, found none"):
        with_draft_window(open_pair(root / "target", None), 9)
    with pytest.raises(ConfigError, match="draft_window needs backend torch or tensorrt"):
        build_config_from({"target": "target", "draft_window": 9, "backend": "tensorrt_llm"}, source="test")
    with pytest.raises(ConfigError, match="mutually exclusive"):
        RuntimeConfig(draft_window=9, use_drafter=False)
