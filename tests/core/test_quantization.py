"""What a user asks for, and what an engine stores of it."""

from dflash_trt.core.quantization import LayerKvScales, QuantizationConfig, QuantizationSpec


def test_the_drafter_is_as_the_target_unless_it_is_named() -> None:
    config = QuantizationConfig(target="fp8", kv_cache="fp8")
    assert (config.drafter_format, config.draft_pages) == ("fp8", "fp8")
    config = QuantizationConfig(target="fp8", kv_cache="fp8", drafter="none", draft_kv_cache="none")
    assert (config.drafter_format, config.draft_pages) == ("none", "none")
    assert QuantizationConfig(drafter="int4", draft_kv_cache="fp8").draft_pages == "fp8"
    assert QuantizationConfig.model_validate("nvfp4") == QuantizationConfig(target="nvfp4")


def test_nothing_is_quantized_by_default_and_calibration_is_small() -> None:
    config = QuantizationConfig()
    assert (config.target, config.experts, config.lm_head, config.draft_lm_head) == ("none", None, "none", "none")
    assert (config.drafter_format, config.kv_cache, config.draft_pages, config.overrides) == (
        "none",
        "none",
        "none",
        {},
    )
    calibration = config.calibration
    assert (calibration.prompts, calibration.num_prompts) == (None, 64)
    assert (calibration.max_prompt_tokens, calibration.chunk_tokens) == (512, 32)


def test_a_tensor_has_the_format_of_its_linear_layer() -> None:
    spec = QuantizationSpec(linears={"target.layers.0.qkv": "fp8"})
    names = ("target.layers.0.qkv", "target.layers.0.qkv.scale", "target.layers.0.qkv_bias", "target.layers.0", "qkv")
    assert [spec.format_of(name) for name in names] == ["fp8", "fp8", None, None, None]


def test_weights_or_pages_make_a_spec() -> None:
    scales = (LayerKvScales(),)
    specs = [{}, {"linears": {"x": "fp8"}}, {"target_kv": scales}, {"draft_kv": scales}]
    assert [QuantizationSpec(**fields).is_empty for fields in specs] == [True, False, False, False]
