"""Builds of backend tensorrt_llm: our own reader opens what they write, what TensorRT-LLM cannot load is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import BuildError, ConfigError, EngineDirError
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.opening import open_executor
from dflash_trt.serving.llm import LLM
from tests.checkpoint.expert_files import to_mxfp4
from tests.checkpoint.test_fp8_checkpoints import write_blocks
from tests.factories import (
    edit_json,
    make_eagle3_head,
    make_speculators_drafter,
    make_target,
    make_zlab_drafter,
    read_json,
)

PROMPT = [5, 17, 80, 33, 9, 200, 41]
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "head_dim": 128}
WIDE |= {"num_key_value_heads": 1, "dtype": torch.bfloat16}
PLAIN_DRAFTER = {"drafter": "none", "draft_kv_cache": "none"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded target in bfloat16, and drafters of which one names its taps in another order."""
    base = tmp_path_factory.mktemp("checkpoints")
    bf16: dict[str, Any] = {"dtype": torch.bfloat16}
    target = make_target(base / "target", max_shard_size="60KB", **bf16)
    make_zlab_drafter(base / "drafter", target_dir=target, **bf16)
    make_zlab_drafter(base / "unsorted", target_dir=target, target_layer_ids=(2, 0, 1), schema="new", **bf16)
    make_eagle3_head(base / "eagle3", target_dir=target)
    prompts = "".join(
        json.dumps({"prompt_token_ids": [5 + (i * 7 + j) % 200 for j in range(12)]}) + "\n" for i in range(2)
    )
    (base / "prompts.jsonl").write_text(prompts)
    return base


def build(base: Path, output: Path, **fields: Any) -> EngineDir:
    given: dict[str, Any] = {"target": "target", "drafter": "drafter", "max_seq_len": 128, "max_batch_size": 4}
    config = BuildConfig(**given | fields)
    return build_engine(
        config, output, base_dir=base, overwrite=False, command=("build",), progress=lambda report: None
    )


def exported(base: Path, output: Path, **fields: Any) -> EngineDir:
    return build(base, output, backend="tensorrt_llm", **fields)


def rebuilt(engine: EngineDir, output: Path) -> EngineDir:
    """An engine of backend torch from the two exported checkpoints, as they are."""
    return build(engine.path, output, target="target", drafter="drafter")


def tokens(engine: EngineDir) -> tuple[tuple[int, ...], float | None]:
    with LLM(engine.path, RuntimeConfig(device="cpu", num_threads=1)) as llm:
        output = llm.generate([PROMPT])[0]
    return output.token_ids, output.acceptance_length


def fp8(base: Path) -> dict[str, Any]:
    return {"target": "fp8", "kv_cache": "fp8", "calibration": {"prompts": str(base / "prompts.jsonl")}}


@pytest.mark.parametrize("quantized", ["nothing", "target", "drafter"])
def test_the_exported_pair_makes_the_engine_that_the_source_makes(base: Path, tmp_path: Path, quantized: str) -> None:
    """Byte for byte: the same weights, codes, scales and K/V scales."""
    calibration = {"calibration": fp8(base)["calibration"]}
    of_drafter = {f"draft.layers.*.{name}": "fp8" for name in ("o", "gate_up", "down")}  # all that may be
    choices: dict[str, dict[str, Any]] = {"nothing": {}, "target": fp8(base), "drafter": {"overrides": of_drafter}}
    quantization = choices[quantized] | calibration
    engine = exported(base, tmp_path / "exported", quantization=quantization)
    ours = rebuilt(engine, tmp_path / "rebuilt")
    direct = build(base, tmp_path / "direct", quantization=quantization | PLAIN_DRAFTER)
    assert ours.manifest.pretrained_config == direct.manifest.pretrained_config == engine.manifest.pretrained_config
    assert ours.manifest.files["rank0.safetensors"] == direct.manifest.files["rank0.safetensors"]
    assert tokens(ours) == tokens(direct)


def test_taps_are_sorted_with_their_columns(base: Path, tmp_path: Path) -> None:
    """The same function of the same hidden states: equal tokens and acceptance, which unpermuted columns lose."""
    engine = exported(base, tmp_path / "exported", drafter="unsorted")
    draft = engine.manifest.draft
    assert draft is not None and draft.target_layer_ids == (0, 1, 2)
    config = read_json(engine.path / "drafter/config.json")
    assert config["dflash_config"]["target_layer_ids"] == [0, 1, 2] and config["block_size"] == 4
    ours, direct = rebuilt(engine, tmp_path / "rebuilt"), build(base, tmp_path / "direct", drafter="unsorted")
    before, after = (load_file(each.weights_path(0))["draft.fc"].chunk(3, dim=1) for each in (direct, ours))
    assert all(torch.equal(after[i], before[j]) for i, j in enumerate((1, 2, 0)))
    assert tokens(ours) == tokens(direct)
    unpermuted = load_file(base / "unsorted/model.safetensors")
    save_file(unpermuted, engine.path / "drafter/model.safetensors", {"format": "pt"})
    assert not torch.equal(
        load_file(rebuilt(engine, tmp_path / "wrong").weights_path(0))["draft.fc"], torch.cat(after, 1)
    )


NORMS: list[dict[str, bool]] = [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}]


@pytest.mark.parametrize("norms", NORMS, ids=["plain", "3.1", "joint"])
def test_an_eagle3_head_is_exported_with_its_taps_and_norms(base: Path, tmp_path: Path, norms: dict[str, bool]) -> None:
    """Byte for byte what the source makes, and every field where TensorRT-LLM reads it."""
    head = make_eagle3_head(tmp_path / "head", target_dir=base / "target", **norms)
    engine = exported(base, tmp_path / "exported", drafter=str(head))
    config = read_json(engine.path / "drafter/config.json")
    assert (config["fc_norm"], config["norm_output"]) == (norms.get("fc_norm", False), norms.get("norm_output", False))
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "norm_before_fc": norms.get("norm_before_fc", False)}
    assert config["eagle_config"] == nested and "norm_before_fc" not in config
    assert (config["target_hidden_size"], config["draft_vocab_size"]) == (64, 64)
    assert engine.manifest.tensorrt_llm is not None
    assert engine.manifest.tensorrt_llm.llm_args["speculative_config"] == {
        "decoding_type": "Eagle3",
        "eagle3_layers_to_capture": [0, 1, 3],
        "eagle3_model_arch": "llama3",
        "max_draft_len": 7,
        "speculative_model": "drafter",
        "enable_penalty": True,
    }
    ours, direct = rebuilt(engine, tmp_path / "rebuilt"), build(base, tmp_path / "direct", drafter=str(head))
    assert ours.manifest.pretrained_config == direct.manifest.pretrained_config == engine.manifest.pretrained_config
    assert ours.manifest.files["rank0.safetensors"] == direct.manifest.files["rank0.safetensors"]
    assert tokens(ours) == tokens(direct)


def test_taps_of_an_eagle3_head_are_sorted_with_their_columns(base: Path, tmp_path: Path) -> None:
    head = make_eagle3_head(tmp_path / "head", target_dir=base / "target", taps=(4, 1, 2))
    engine, direct = (
        exported(base, tmp_path / "exported", drafter=str(head)),
        build(base, tmp_path / "direct", drafter=str(head)),
    )
    ours = rebuilt(engine, tmp_path / "rebuilt")
    before, after = (load_file(each.weights_path(0))["draft.fc"].chunk(3, dim=1) for each in (direct, ours))
    assert all(torch.equal(after[i], before[j]) for i, j in enumerate((1, 2, 0)))
    assert tokens(ours) == tokens(direct)


def test_an_eagle3_head_keeps_no_memory_for_a_context(base: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    for drafter in ("drafter", "eagle3"):
        config = BuildConfig(target="target", drafter=drafter, backend="tensorrt_llm", max_seq_len=128)
        engine = build_engine(
            config, tmp_path / drafter, base_dir=base, overwrite=False, command=("build",), progress=lambda _: None
        )
        notes.append(" ".join(read_json(engine.path / "provenance.json")["notes"]))
    assert ["context takes" in note for note in notes] == [True, False]


def test_an_index_and_the_tokenizer_come_with_the_export(base: Path, tmp_path: Path) -> None:
    engine = exported(base, tmp_path / "exported", quantization=fp8(base))
    index = read_json(engine.path / "target/model.safetensors.index.json")
    for name, file in index["weight_map"].items():
        assert name in load_file(engine.path / "target" / file)
    assert (engine.path / "target/tokenizer.json").read_bytes() == (base / "target/tokenizer.json").read_bytes()
    assert EngineDir.open(engine.path, verify_hashes=True) == engine


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "use_sliding_window": True}
REFUSED = [
    ({"dtype": "float32"}, "dtype: expected bfloat16 or float16"),
    ({"page_size": 24}, "page_size: expected a power of two, found 24"),
    ({"plugin_library": "p.so"}, "plugin_library: expected nothing with backend tensorrt_llm"),
    ({"max_num_tokens": 64}, "max_num_tokens: expected at least max_seq_len 128"),
    ({"max_draft_len": 0}, "max_draft_len: expected 1 or more with a drafter"),
    ({"quantization": {"target": "int4"}}, "linear layers: expected fp8, fp8_block, mxfp4, nvfp4"),
    (
        {"quantization": {"target": "fp8_block"}},
        "expected fp8 or nvfp4 in attention, MLPs and experts, found fp8_block",
    ),
    ({"quantization": {"lm_head": "fp8"}}, "target.lm_head: expected fp8 or nvfp4 in attention"),
    ({"quantization": {"draft_lm_head": "fp8"}}, "draft_lm_head: expected none (the drafter takes the target's head)"),
    ({"quantization": {"drafter": "fp8"}}, "expected unquantized weights of the drafter's q, k, v and fc"),
    ({"drafter": "eagle3", "quantization": {"drafter": "fp8"}}, "quantization: expected an unquantized EAGLE-3 head"),
    ({"quantization": {"draft_kv_cache": "fp8"}}, "draft_kv_cache: expected none (its context has the dtype of fc)"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_tensorrt_llm_cannot_load_is_refused_before_any_work(
    base: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises((BuildError, ConfigError)) as raised:
        exported(base, tmp_path / "engine", **fields)
    assert message in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (SLIDING | {"is_causal": False}, "found a non-causal one with a window of 8"),
        ({"is_causal": True}, "found a causal one with no window"),
        ({"input_embedding_scale": 2.0}, "drafter input_embedding_scale: expected 1, found 2"),
    ],
)
def test_a_drafter_that_would_draft_badly_is_refused(
    base: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    make_zlab_drafter(tmp_path / "odd", target_dir=base / "target", dtype=torch.bfloat16)
    edit_json(tmp_path / "odd/config.json", **change)
    with pytest.raises(BuildError) as raised:
        exported(base, tmp_path / "engine", drafter=str(tmp_path / "odd"))
    assert message in str(raised.value)


def test_a_drafter_with_a_head_of_its_own_is_refused(base: Path, tmp_path: Path) -> None:
    drafter = make_speculators_drafter(tmp_path / "own", target_dir=base / "target", dtype=torch.bfloat16)
    with pytest.raises(BuildError) as raised:
        exported(base, tmp_path / "engine", drafter=str(drafter))
    assert "drafter vocabulary: expected the target's embedding and head, found its own head of 64" in str(raised.value)
    assert "drafter format: expected z-lab's, found speculators" in str(raised.value)


def test_a_quantized_target_is_passed_on_as_published_or_not_at_all(base: Path, tmp_path: Path) -> None:
    quantized = exported(base, tmp_path / "first", quantization=fp8(base)).path / "target"
    again = exported(base, tmp_path / "second", target=str(quantized))
    for path in quantized.iterdir():
        assert (again.path / "target" / path.name).read_bytes() == path.read_bytes(), path.name
    assert open_pair(again.path / "target", None).quantization.target_kv is not None
    plain = exported(base, tmp_path / "partly", quantization={"overrides": {"target.layers.0.down": "fp8"}})
    with pytest.raises(
        BuildError, match=r"expected an unquantized target, to quantize it, found fp8 in target.layers.0"
    ):
        exported(
            base,
            tmp_path / "third",
            target=str(plain.path / "target"),
            quantization={"target": "nvfp4", "overrides": {"target.layers.0.down": "none"}},
        )


@pytest.mark.parametrize("published", ["MXFP4", "FP8 in blocks"])
def test_other_published_formats_are_passed_on_byte_for_byte(tmp_path: Path, published: str) -> None:
    """TensorRT-LLM reads them itself. The torch engine of what was passed on is that of the source."""
    if published == "MXFP4":
        source = make_target(tmp_path / "target", family="gpt_oss", dtype=torch.bfloat16)
        to_mxfp4(source)
    else:
        source = tmp_path / "target"
        write_blocks(make_target(tmp_path / "plain", **WIDE), source, modules_to_not_convert=["lm_head"])
    make_zlab_drafter(tmp_path / "drafter", target_dir=source, dtype=torch.bfloat16)
    engine = exported(tmp_path, tmp_path / "engine")
    found, expected = (load_file(path / "model.safetensors") for path in (engine.path / "target", source))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    section = "quantization_config"
    assert read_json(engine.path / "target/config.json")[section] == read_json(source / "config.json")[section]
    again, direct = rebuilt(engine, tmp_path / "again"), build(tmp_path, tmp_path / "direct")
    assert again.manifest.pretrained_config == direct.manifest.pretrained_config
    assert direct.manifest.pretrained_config.quantization is not None
    assert tokens(again) == tokens(direct)


def test_its_steps_cannot_be_run_here(base: Path, tmp_path: Path) -> None:
    engine = exported(base, tmp_path / "engine")
    with pytest.raises(EngineDirError, match="whose steps run in this process, found one of backend tensorrt_llm"):
        open_executor(engine, RuntimeConfig())
