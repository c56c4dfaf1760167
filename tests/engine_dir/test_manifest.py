"""A config.json that contradicts itself is refused, and what follows from one that does not."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.core.step_spec import DRAFT_OUTPUTS, STEP_INPUTS, STEP_OUTPUTS
from dflash_trt.engine_dir import EngineManifest
from dflash_trt.engine_dir.manifest import StepTables
from dflash_trt.engine_dir.provenance import TensorRTLLMRecord, triton_model
from tests.factories import read_json

PLANS: dict[str, Any] = {
    "tensorrt_version": "11.0",
    "gpu_name": "a GPU",
    "compute_capability": "9.0",
    "plugin_library": "libdflash_trt_plugins.so",
    "flags": [],
    "profiles": [],
    "num_layers": 1,
    "build_time_s": 0.0,
}
EXPORT: dict[str, Any] = {"llm_args": {"model": "target"}}
TWO_RANKS = {"world_size": 2, "tp_size": 2, "pp_size": 1, "rank": 0}


@pytest.fixture
def fields(built: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(built / "config.json")
    return found


def read(fields: dict[str, Any], **changed: Any) -> EngineManifest:
    return EngineManifest.model_validate_json(json.dumps(fields | changed), strict=True)


@pytest.mark.parametrize(
    ("backend", "plans", "export"), list(product(("torch", "tensorrt", "tensorrt_llm"), (None, PLANS), (None, EXPORT)))
)
def test_a_backend_has_its_own_record_and_no_other(fields, backend, plans, export) -> None:
    records = {"backend": backend, "tensorrt": plans, "tensorrt_llm": export}
    if (plans is not None, export is not None) == (backend == "tensorrt", backend == "tensorrt_llm"):
        read(fields, **records)
        return
    with pytest.raises(ValueError, match=r"record for backend tensorrt.*, and for no other"):
        read(fields, **records)


@pytest.mark.parametrize("model", ["target", "draft"])
def test_the_model_with_the_fewest_positions_bounds_a_sequence(fields, model) -> None:
    fields["pretrained_config"][model]["max_position_embeddings"] = 300
    limits = fields["build_config"]
    assert read(fields, build_config=limits | {"max_seq_len": 300}).build_config.max_seq_len == 300
    with pytest.raises(ValueError, match="max_seq_len of at most 300"):
        read(fields, build_config=limits | {"max_seq_len": 301})


def test_a_sequence_has_a_prompt_and_an_output_at_least(fields) -> None:
    limits = fields["build_config"]
    assert read(fields, build_config=limits | {"max_seq_len": 2}).build_config.max_seq_len == 2
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        read(fields, build_config=limits | {"max_seq_len": 1})


@pytest.mark.parametrize("name", ["config.json", "provenance.json", ""])
def test_files_whose_hashes_stand_elsewhere_are_not_listed(fields, name) -> None:
    entry = {"sha256": "0" * 64, "size_bytes": 0}
    with pytest.raises(ValueError, match="a plain path inside the engine directory"):
        read(fields, files=fields["files"] | {name: entry})
    read(fields, files=fields["files"] | {f"tokenizer/{name or 'x'}": entry})


def test_plans_have_the_page_groups_of_the_windows_that_a_sequence_outgrows_or_none(fields) -> None:
    """With its drafts a sequence has max_seq_len + 3 positions at most."""
    layers = fields["pretrained_config"]["target"]["layers"]
    for layer, window in zip(layers, (9, 510, 511), strict=False):
        layer["mixer"]["mask"]["window"] = window
    fields["build_config"]["max_seq_len"] = 508
    assert read(fields).has_page_groups
    for windows in ([], [9, 510]):
        found = read(fields, backend="tensorrt", tensorrt=PLANS | {"page_windows": windows})
        assert found.has_page_groups == bool(windows)
    for windows in ([9], [9, 510, 511], [510, 9]):
        with pytest.raises(ValueError, match=r"page_windows \[9, 510\] in 'tensorrt'"):
            read(fields, backend="tensorrt", tensorrt=PLANS | {"page_windows": windows})


def test_files_that_an_engine_needs_are_those_of_its_backend_and_of_every_rank(fields) -> None:
    fields["pretrained_config"]["mapping"] = TWO_RANKS
    assert read(fields).required_files == ("rank0.safetensors", "rank1.safetensors")
    plans = ("rank0.engine", "rank1.engine")
    built = read(fields, backend="tensorrt", tensorrt=PLANS)
    assert built.required_files == (*plans, "libdflash_trt_plugins.so")
    files = {"target/config.json", "drafter/config.json", "llm_args.yaml", "triton/model.yaml"}
    exported = {"backend": "tensorrt_llm", "tensorrt_llm": EXPORT}
    assert set(read(fields, **exported).required_files) == files
    fields["pretrained_config"]["draft"] = None
    fields["build_config"]["max_draft_len"] = 0
    assert set(read(fields, **exported).required_files) == files - {"drafter/config.json"}


def test_states_are_those_of_a_rank_with_the_drafter_or_without(fields) -> None:
    whole = read(fields).pretrained_config
    fields["pretrained_config"]["mapping"] = TWO_RANKS
    states = read(fields).pretrained_config.states()
    assert states.bytes_per_token == whole.states().bytes_per_token // 2
    alone = read(fields).pretrained_config.states(has_drafter=False)
    assert (alone.target, alone.draft) == (states.target, ())
    assert len(states.draft) == 2


def test_the_step_contract_has_every_tensor_of_a_step() -> None:
    tables = StepTables.current()
    assert [row.name for row in tables.inputs] == [tensor.name for tensor in STEP_INPUTS]
    assert [row.name for row in tables.outputs] == [tensor.name for tensor in (*STEP_OUTPUTS, *DRAFT_OUTPUTS)]


def test_arguments_of_tensorrt_llm_have_paths_of_the_directory_wherever_it_is(tmp_path: Path, monkeypatch) -> None:
    speculative = {"decoding_type": "DFlash", "speculative_model": "drafter"}
    monkeypatch.chdir(tmp_path)
    for own, resolved in (
        ({}, {}),
        ({"speculative_config": speculative}, {"speculative_model": str(tmp_path / "e/drafter")}),
    ):
        args = TensorRTLLMRecord(llm_args={"model": "target", "max_num_tokens": 9, **own}).resolved_args(Path("e"))
        assert (args.pop("model"), args.pop("max_num_tokens")) == (str(tmp_path / "e/target"), 9)
        assert args == ({"speculative_config": speculative | resolved} if own else {})
    triton = triton_model({"model": "m"})
    settings = {"max_batch_size": 0, "decoupled": True, "cancellation_check_period_ms": 100}
    assert triton == {"model": "m", "triton_config": settings}
