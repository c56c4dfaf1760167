"""What opening an engine decides of a config, and what it hands on to the backend."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.backends.base import backend_of
from dflash_trt.core.draft_lengths import CpuWeights, usual_draft_lengths
from dflash_trt.core.errors import CapacityError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.runtime_config import RuntimeConfig, SettingError
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor import opening, threads
from dflash_trt.executor.opening import max_draft_len, open_executor, resolved_config, with_one_draft_length
from dflash_trt.executor.ranks import executor as ranks
from tests.engine_dir.building import build
from tests.factories import make_target, make_zlab_drafter

K = 3


USUAL = usual_draft_lengths(K, 64, "cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("engines")
    target = make_target(root / "target", tokenizer=False)
    make_zlab_drafter(root / "drafter", target_dir=target, block_size=K + 1)
    make_target(root / "recurrent target", family="qwen3_5_text", tokenizer=False)
    build(root, root / "pair", drafter="drafter", max_seq_len=64)
    build(root, root / "alone", max_seq_len=64)
    build(root, root / "recurrent", target="recurrent target", max_seq_len=64)
    return root


@pytest.fixture
def pair(root: Path) -> EngineDir:
    return EngineDir.open(root / "pair")


def changed(engine: EngineDir, **fields: Any) -> EngineDir:
    """An engine of another backend, or for other ranks."""
    models = engine.manifest.pretrained_config.model_copy(update={"mapping": fields.pop("mapping", Mapping())})
    return replace(engine, manifest=engine.manifest.model_copy(update={"pretrained_config": models, **fields}))


def test_what_is_left_open_is_decided_by_engine_and_machine(
    pair: EngineDir, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "available_cores", lambda: 8)
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 16)
    config = resolved_config(pair, RuntimeConfig(device="cpu"))
    assert (config.device, config.overlap_scheduling, config.num_threads) == ("cpu", False, 8)
    assert (config.draft_length, config.max_draft_tokens, config.enable_prefix_caching) == (USUAL, K, True)
    two = resolved_config(changed(pair, mapping=Mapping(world_size=2, tp_size=2)), RuntimeConfig(device="cpu"))
    assert two.num_threads == 4, "ranks divide the cores"
    over_nodes = RuntimeConfig(device="cpu", nnodes=2, master_addr="x")
    two = resolved_config(changed(pair, mapping=Mapping(world_size=2, tp_size=2)), over_nodes)
    assert two.num_threads == 8, "each node has its own"
    alone = resolved_config(EngineDir.open(root / "alone"), RuntimeConfig(device="cpu"))
    assert (alone.draft_length, max_draft_len(EngineDir.open(root / "alone"))) == ({1: 0}, 0)


@pytest.mark.parametrize(
    ("formats", "weights"),
    [
        (["int4"] * 3, "four_bits"),
        (["nvfp4_w4a16", "fp8", "mxfp4"], "four_bits"),
        (["int8", "fp8", "int8"], "int8"),
        (["int4", "int8"], "float"),
        (["fp8"] * 3, "float"),
    ],
    ids=str,
)
def test_k_on_a_cpu_is_that_of_most_of_the_targets_weights(
    pair: EngineDir, formats: list[str], weights: CpuWeights
) -> None:
    linears = {f"target.layers.0.{index}": name for index, name in enumerate(formats)}
    of_drafter = {f"draft.layers.0.{index}": "fp8" if weights != "float" else "int4" for index in range(4)}
    models = pair.manifest.pretrained_config
    models = models.model_copy(update={"quantization": QuantizationSpec(linears=linears | of_drafter)})
    engine = replace(pair, manifest=pair.manifest.model_copy(update={"pretrained_config": models}))
    found = resolved_config(engine, RuntimeConfig(device="cpu")).draft_length
    assert found == usual_draft_lengths(K, 64, "cpu", weights=weights)
    assert (found == USUAL) is (weights == "float")


@pytest.mark.parametrize(
    ("settings", "lengths"),
    [
        ({}, USUAL),
        ({"draft_length": 1}, {1: 1}),
        ({"draft_length": {1: K, 4: 0}}, {1: K, 4: 0}),
        ({"draft_length": 0}, {1: 0}),
        ({"adaptive_draft_length": True}, {1: K}),
        ({"draft_length": 1, "adaptive_draft_length": True}, {1: 1}),
        ({"ngram": True}, USUAL),
        ({"use_drafter": False}, None),
    ],
    ids=str,
)
def test_k_falls_with_the_number_of_requests_unless_one_is_named(
    pair: EngineDir, root: Path, settings: Any, lengths: Any
) -> None:
    config = resolved_config(pair, RuntimeConfig(device="cpu", **settings))
    assert config.draft_length == lengths
    assert config.adaptive_draft_length == settings.get("adaptive_draft_length", False)
    assert resolved_config(pair, config) == config, "an executor is opened with what was resolved"
    assert resolved_config(EngineDir.open(root / "alone"), RuntimeConfig(device="cpu")).draft_length == {1: 0}


@pytest.mark.parametrize(
    ("settings", "lengths"),
    [
        ({}, {1: K}),
        ({"draft_length": 1}, {1: 1}),
        ({"adaptive_draft_length": True}, None),
        ({"use_drafter": False}, None),
    ],
    ids=str,
)
def test_acceptance_is_compared_at_one_k(pair: EngineDir, root: Path, settings: Any, lengths: Any) -> None:
    assert with_one_draft_length(RuntimeConfig(**settings), pair).draft_length == lengths
    alone = EngineDir.open(root / "alone")
    assert resolved_config(alone, with_one_draft_length(RuntimeConfig(device="cpu"), alone)).max_draft_tokens == 0


def test_what_is_given_stays(pair: EngineDir, root: Path) -> None:
    given = {"device": "cpu", "overlap_scheduling": True, "num_threads": 3, "enable_prefix_caching": False, "seed": 5}
    for drafting in ({"draft_length": 2}, {"use_drafter": False}, {"draft_length": {1: 3, 8: 0}}):
        config = RuntimeConfig(**given, **drafting)
        assert resolved_config(pair, config) == config
    recurrent = EngineDir.open(root / "recurrent")
    assert resolved_config(recurrent, RuntimeConfig(device="cpu")).enable_prefix_caching, "through snapshots"
    config = resolved_config(recurrent, RuntimeConfig(device="cpu", num_state_snapshots=2, deterministic=True))
    assert (config.num_state_snapshots, config.deterministic) == (2, True)


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        *(
            ("alone", fields, "an engine with a drafter, found one without")
            for fields in (
                {"draft_length": 1},
                {"adaptive_draft_length": True},
                {"draft_length": {1: 1}},
                {"draft_window": 9},
                {"ngram": True},
            )
        ),
        *(
            ("pair", fields, f"0 to {K}, this engine's max_draft_len, found {K + 1}")
            for fields in ({"draft_length": K + 1}, {"draft_length": {1: 1, 2: K + 1}})
        ),
        ("pair", {"disk_cache_dir": "/disk"}, "host_cache_bytes as well, found none"),
        ("tensorrt", {"disk_cache_bytes": 9, "host_cache_bytes": 1 << 20}, "disk_cache_dir as well, found none"),
        ("pair", {"publish_prompts": True}, "disk_cache_dir as well, found none"),
        ("pair", {"nnodes": 2, "master_addr": "x"}, "a divisor of 1, the engine's ranks, found 2"),
        ("pair", {"master_addr": "x"}, "nnodes of 2 or more as well, found x"),
        ("pair", {"master_port": 9}, "nnodes of 2 or more as well, found 9"),
        ("four", {"nnodes": 3, "master_addr": "x"}, "a divisor of 4, the engine's ranks, found 3"),
        ("four", {"master_addr": None, "nnodes": 2}, "an address, for several nodes, found none"),
        (
            "four",
            {"disk_cache_dir": "/d", "host_cache_bytes": 1 << 20, "nnodes": 2, "master_addr": "x"},
            "ranks on one node, found 2 nodes",
        ),
        ("pair", {"num_state_snapshots": 1}, "a target with recurrent layers, found one whose layers all attend"),
        ("pair", {"plugin_library": "p.so"}, "an engine with TensorRT plugins, found one of backend torch"),
        ("tensorrt", {"draft_window": 9}, "an engine of backend torch, found a TensorRT engine"),
        ("tensorrt", {"deterministic": True}, "a TensorRT engine that was built with it, found one that was not"),
        ("tensorrt", {"device": "cpu"}, "a GPU, for a TensorRT engine, found cpu"),
    ],
)
def test_a_setting_that_the_engine_cannot_have_is_refused_by_its_name(
    root: Path, name: str, fields: dict[str, Any], expected: str
) -> None:
    kind, *of = name.split()
    engine = EngineDir.open(root / ((*of, "pair")[0] if kind in ("tensorrt", "four") else kind))
    if kind == "four":
        engine = changed(engine, mapping=Mapping(world_size=4, tp_size=4))
    if kind == "tensorrt":
        engine = changed(engine, backend="tensorrt")
    device = {} if kind == "tensorrt" else {"device": "cpu"}
    with pytest.raises(SettingError, match=f"^{next(iter(fields))}: expected {expected}") as error:
        resolved_config(engine, RuntimeConfig(**(device | fields)))
    assert error.value.name == next(iter(fields))


def test_settings_at_their_limits_are_taken(pair: EngineDir, root: Path) -> None:
    for fields in ({"draft_length": K}, {"draft_length": 0}, {"draft_length": {1: K}}, {"draft_window": 1}):
        resolved_config(pair, RuntimeConfig(device="cpu", **fields))
    resolved_config(EngineDir.open(root / "alone"), RuntimeConfig(device="cpu", draft_length=0))
    resolved_config(pair, RuntimeConfig(device="cpu", num_state_snapshots=0))
    compiled = changed(EngineDir.open(root / "recurrent"), backend="tensorrt")
    config = resolved_config(compiled, RuntimeConfig())
    assert (config.device, config.overlap_scheduling, config.enable_prefix_caching) == ("cuda", True, True)
    assert resolved_config(compiled, RuntimeConfig(num_state_snapshots=2)).num_state_snapshots == 2
    compiled = changed(pair, backend="tensorrt")
    assert resolved_config(compiled, RuntimeConfig(ngram=True)).overlap_scheduling is False, "it needs all results"


@pytest.mark.parametrize(
    ("device", "has_gpu", "has_triton", "found"),
    [
        ("auto", False, True, "cpu"),
        ("auto", True, True, "cuda"),
        ("cpu", True, True, "cpu"),
        ("cuda", True, True, "cuda"),
        ("cuda", False, True, "a CUDA GPU that PyTorch can use, found none"),
        ("cuda", True, False, "Triton, which the GPU's kernels need, found none"),
        ("auto", True, False, "Triton, which the GPU's kernels need, found none"),
    ],
)
def test_an_engine_runs_on_the_gpu_that_is_there(
    pair: EngineDir, monkeypatch: pytest.MonkeyPatch, device: Any, has_gpu: bool, has_triton: bool, found: str
) -> None:
    monkeypatch.setattr(threads.torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(opening, "find_spec", lambda name: has_triton or None)
    if found in ("cpu", "cuda"):
        config = resolved_config(pair, RuntimeConfig(device=device))
        assert (config.device, config.overlap_scheduling) == (found, found == "cuda")
        return
    with pytest.raises(SettingError, match=f"^device: expected {found}"):
        resolved_config(pair, RuntimeConfig(device=device))


def test_a_recurrent_target_is_deterministic_everywhere(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_runs_on_gpu", lambda device: device != "cpu")
    engine = EngineDir.open(root / "recurrent")
    for device in ("cpu", "cuda"):
        config = resolved_config(engine, RuntimeConfig(device=device, deterministic=True))
        assert config.deterministic and config.device == device


def test_the_backend_gets_the_resolved_config_the_window_and_the_lengths(
    pair: EngineDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        type(backend_of("torch")), "open", lambda backend, *given, **named: calls.append((*given, named))
    )
    open_executor(pair, RuntimeConfig(device="cpu", num_threads=1, draft_window=9), draft_lens=(0, 2))
    [(engine, config, named)] = calls
    assert config == resolved_config(pair, RuntimeConfig(device="cpu", num_threads=1, draft_window=9))
    assert named == {"draft_lens": (0, 2)}
    assert {gqa.mask.window for gqa in engine.manifest.draft.attentions} == {9}


@pytest.mark.parametrize("draft_lens", [None, (0, 2)])
def test_several_ranks_and_openmp_are_told_what_they_need(
    pair: EngineDir, monkeypatch: pytest.MonkeyPatch, draft_lens: tuple[int, ...] | None
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(ranks, "open_ranks", lambda *given, **named: calls.append((*given, named)))
    monkeypatch.setattr(threads, "keep_waits_short", calls.append)
    two = changed(pair, mapping=Mapping(world_size=2, tp_size=2))
    given = RuntimeConfig(device="cpu", num_threads=3)
    open_executor(two, given, draft_lens=draft_lens)
    assert calls == [(two, resolved_config(two, given), {"draft_lens": draft_lens})]
    open_executor(pair, RuntimeConfig(device="cpu", num_threads=3, kv_cache_bytes=1 << 20)).close()
    assert calls[1:] == [3]


def test_a_budget_too_small_is_refused_before_anything_is_loaded(
    pair: EngineDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(backend_of("torch")), "open", lambda *given, **named: pytest.fail("loaded"))
    with pytest.raises(CapacityError, match="K/V pages: expected room for one sequence"):
        open_executor(pair, RuntimeConfig(device="cpu", kv_cache_bytes=100))
