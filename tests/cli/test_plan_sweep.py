"""`dflash-trt plan --sweep` from config.json files: the points, the files, what they say of themselves, refusals."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli.plan_sweep import _layout
from dflash_trt.simulation.load import Lengths
from dflash_trt.simulation.sweep import Workload
from tests.cli.calls import Recorder
from tests.cli.conftest import Invoke
from tests.hub_server import Hub, point_at, serving
from tests.plan.test_machine_file import MACHINE
from tests.plan.test_step_floor import DRAFTER, QWEN3_8B, write

SIZES = ("--max-seq-len", 2048, "--prompt-tokens", 100, "--output-tokens", 24, "--requests-per-client", 1)
ACCEPTED = "0.8,0.6,0.4,0.2"
DEFAULT = Workload(
    concurrencies=(1, 2, 4, 8, 16, 32, 64),
    request_rates_per_s=(),
    lengths=Lengths(num_prompt_tokens=1024, num_output_tokens=256),
    spread_fraction=0.2,
    requests_per_client=3,
    duration_s=60.0,
)
HEAD = QWEN3_8B | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 19, 34]},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    root = tmp_path_factory.mktemp("published")
    return write(root, "target", QWEN3_8B), write(root, "drafter", DRAFTER), write(root, "head", HEAD)


def sweep(invoke: Invoke, *words: Any) -> dict[str, Any]:
    result = invoke("plan", *words, "--sweep", *SIZES, "--json")
    assert result.exit_code == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    assert result.stdout == json.dumps(report, indent=2) + "\n"
    return report


def test_every_drafter_is_simulated_in_every_layout_with_every_k(pair, invoke) -> None:
    target, drafter, head = pair
    words = ("--gpu", "h200", "--layout", "tp1", "--layout", "tp2x2", "--concurrency", "2", "--per-user", 100)
    drafters = ("--other-drafter", head, "--accepted", ACCEPTED, "--accepted", "0.7,0.4,0.2")
    report = sweep(invoke, target, drafter, *words, *drafters, "--sweep-draft-length", 2, "--sweep-draft-length", 3)
    points = report["points"]
    assert report["hardware"] == "4 x h200", "of the largest"
    sides = [("AR", 0), ("DFlash", 2), ("DFlash", 3), ("EAGLE-3", 2), ("EAGLE-3", 3)]
    found = [(point["drafter"], point["num_draft_tokens"], point["layout"]) for point in points]
    assert sorted(found) == sorted((*side, layout) for side in sides for layout in ("tp1x1", "tp2x2"))
    for point in points:
        assert 0 < point["floor_fraction"] < 1
        assert point["num_gpus"] == (1 if point["layout"] == "tp1x1" else 4)
        assert point["output_tok_per_s_per_gpu"] * point["num_gpus"] == pytest.approx(point["output_tok_per_s"])
    plain, *_, dflash = (point for point in points if point["layout"] == "tp1x1" and point["drafter"] != "EAGLE-3")
    assert dflash["tok_per_s_per_user"] > plain["tok_per_s_per_user"]
    assert dflash["acceptance_length"] > 1.5 and plain["acceptance_length"] is None
    [named] = report["best"]
    assert named["point"]["output_tok_per_s_per_gpu"] == max(
        point["output_tok_per_s_per_gpu"] for point in points if point["tok_per_s_per_user"] >= 100
    )


@pytest.mark.parametrize(
    ("text", "sizes", "num_replicas"),
    [
        ("tp8ep4", (8, 4, 1, False), 1),
        ("tp2", (2, 1, 1, False), 1),
        ("tp1x8", (1, 1, 1, False), 8),
        ("dp4", (4, 1, 1, True), 1),
        ("dp8ep2x3", (8, 2, 1, True), 3),
        ("tp8ep8dcp8x2", (8, 8, 8, False), 2),
    ],
)
def test_a_layout_is_ranks_groups_of_experts_and_replicas(text, sizes, num_replicas) -> None:
    fields = dict(zip(("tp_size", "ep_size", "dcp_size", "attention_dp"), sizes, strict=True))
    assert _layout(text) == (fields, num_replicas)


def test_everything_that_is_written_says_that_it_is_simulated_and_what_was_assumed(pair, invoke, tmp_path) -> None:
    target, drafter, _ = pair
    files = ("--csv", tmp_path / "points.csv", "--figure", tmp_path / "points.svg", "--per-user", 1)
    words = (target, drafter, "--gpu", "b300", "--sweep", *SIZES, "--concurrency", "1,2", "--accepted", ACCEPTED)
    result = invoke("plan", *words, *files)
    assert result.exit_code == 0, result.stderr
    with (tmp_path / "points.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert {row["kind"] for row in rows} == {"simulated"} and len(rows) == 4
    figure = (tmp_path / "points.svg").read_text()
    assert "Throughput against speed per user, simulated" in figure and "Simulated, not measured: " in figure
    for text in (result.stdout, figure.replace("\n", " ")):
        assert "accepted by position: 0.8, 0.6, 0.4, 0.2" in text and "simulated" in text.lower()
    assert "on b300 take times as NVIDIA measured them (aiconfigurator-core" in result.stdout
    assert "where the device's time comes from: " in result.stdout
    assert "best at 1 tok/s per user: " in result.stdout


def test_arrivals_take_as_long_as_they_come_and_not_as_the_engine_takes(pair, invoke) -> None:
    """40 requests of 24 tokens in about 10 s; with a spread of lengths the tokens differ, and the rate hardly."""
    words = (pair[0], "--gpu", "h200", "--request-rate", 4, "--duration", 10)
    speeds = []
    for spread in (0.0, 0.5):
        [point] = sweep(invoke, *words, "--spread", spread)["points"]
        assert (point["concurrency"], point["request_rate_per_s"]) == (None, 4)
        speeds.append(point["output_tok_per_s"])
        assert point["time_to_first_token_p50_s"] < 0.05
    assert speeds[0] == pytest.approx(4 * 24, rel=0.3) and speeds[0] != speeds[1]
    closed = sweep(invoke, pair[0], "--gpu", "h200", "--concurrency", 1)["points"]
    assert closed[0]["output_tok_per_s"] > 1.5 * speeds[0]


def test_prompts_that_begin_alike_are_computed_in_part(pair, invoke) -> None:
    words = ("plan", pair[0], "--gpu", "h200", "--sweep", "--concurrency", 4, "--requests-per-client", 4)
    words = (*words, "--max-seq-len", 2048, "--prompt-tokens", 1000, "--output-tokens", 8, "--json")
    cold, shared = (json.loads(invoke(*words, *more).stdout) for more in ((), ("--shared-prefix", 900)))
    first_s = [report["points"][0]["time_to_first_token_p50_s"] for report in (cold, shared)]
    assert first_s[1] < 0.7 * first_s[0]
    assert any("the first 900 of a prompt from the prefix cache" in text for text in shared["assumptions"])
    assert any("no prefix hits" in text for text in cold["assumptions"])


def test_a_name_on_the_hub_is_simulated_with_its_known_drafter_or_with_none(
    pair, invoke, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("Qwen/Qwen3-8B", "--gpu", "h200", "--concurrency", 1)
    with serving(Hub()) as hub:
        hub.add("Qwen/Qwen3-8B", pair[0])
        hub.add("z-lab/Qwen3-8B-DFlash-b16", pair[1])
        point_at(hub, tmp_path / "cache", monkeypatch)
        for more, sides in ((("--accepted", ACCEPTED), ["AR", "DFlash"]), (("--drafter", "none"), ["AR"])):
            points = sweep(invoke, *words, *more)["points"]
            assert [point["drafter"] for point in points] == sides
            assert [point["num_draft_tokens"] for point in points] == [0, 4][: len(sides)]


def test_the_drafters_of_a_pair_have_its_window_and_its_drafter_alone_its_other_choices(pair, invoke) -> None:
    target, drafter, head = pair
    words = (target, drafter, "--gpu", "h200", "--concurrency", 8, "--max-batch-size", 8)
    words += ("--prompt-tokens", 32768, "--other-drafter", head, "--accepted", ACCEPTED, "--accepted", ACCEPTED)

    def speeds(*more: Any) -> list[tuple[int, float]]:
        result = invoke("plan", *words, "--sweep", "--output-tokens", 24, "--requests-per-client", 1, *more, "--json")
        assert result.exit_code == 0, result.stderr
        return [(point["num_draft_tokens"], point["output_tok_per_s"]) for point in json.loads(result.stdout)["points"]]

    plain, drafting, heads = speeds()
    narrow = speeds("--draft-window", 64)
    assert narrow[0] == plain and narrow[1] > drafting and narrow[2] > heads
    shorter = speeds("--max-draft-len", 2, "--drafter-override", "block_size=4")  # a key that the head has not
    assert [num_drafts for num_drafts, _ in shorter] == [0, 2, 4]


def test_a_load_without_options_has_the_defaults_that_the_help_states(pair, invoke, monkeypatch) -> None:
    from dflash_trt.simulation import sweep as simulation

    recorder = Recorder(simulation.sweep)
    monkeypatch.setattr(simulation, "sweep", recorder)
    words = ("plan", pair[0], "--gpu", "h200", "--tp-size", 2, "--sweep")
    assert invoke(*words).stderr == "error: recorded\n"
    [engine] = recorder.arguments["engines"]
    assert (engine.layout, engine.num_gpus, recorder.arguments["workload"]) == ("tp2x1", 2, DEFAULT)
    assert invoke(*words, "--request-rate", 3).stderr == "error: recorded\n"
    assert recorder.arguments["workload"] == replace(DEFAULT, concurrencies=(), request_rates_per_s=(3,))


def test_a_machine_file_takes_the_place_of_the_gpu(pair, invoke, tmp_path) -> None:
    """The file's costs are a GPU's, its bandwidth is a CPU's: steps wait for weights."""
    target, _, _ = pair
    path = tmp_path / "machine.json"
    path.write_text(MACHINE.model_copy(update={"memory_bytes": 1 << 36}).text())
    report = sweep(invoke, target, "--machine", path, "--concurrency", "1")
    [point] = report["points"]
    assert point["tok_per_s_per_user"] == pytest.approx(0.8e10 / (2 * 7.57e9), rel=0.05)
    assert any("machine file" in text for text in report["assumptions"])
    shown = invoke("plan", target, "--machine", path, "--max-seq-len", 2048)
    assert shown.exit_code == 0 and "fits on a CPU" in shown.stdout


def test_what_does_not_fit_is_left_out_with_its_reason(pair, invoke, tmp_path) -> None:
    target, _, _ = pair
    path = tmp_path / "machine.json"
    path.write_text(MACHINE.model_copy(update={"memory_bytes": 13 << 30, "link_bytes_per_s": 1e11}).text())
    layouts = ("--layout", "tp1", "--layout", "tp2", "--layout", "tp1", "--layout", "tp3", "--layout", "tp2dcp2")
    limits = ("--max-batch-size", 4, "--max-num-tokens", 256)
    report = sweep(invoke, target, "--machine", path, *layouts, *limits, "--concurrency", 1)
    assert [point["layout"] for point in report["points"]] == ["tp2x1"]
    lacks, refused, divided = report["left_out"]
    assert "tp2dcp2: " in divided and "a target with latents" in divided
    assert lacks.startswith("AR, tp1: each rank lacks ") and "num_heads" in refused
    nothing = invoke("plan", target, "--machine", path, "--sweep", *SIZES, *limits)
    assert nothing.exit_code == 1 and "no configuration fits" in nothing.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "h200", "--csv", "x.csv"), "--sweep with its options, found --csv"),
        (("--gpu", "h200", "--sweep"), "--accepted: expected one for each of 1 drafters, found 0"),
        (("--gpu", "48", "--sweep", "--accepted", "0.5"), "a machine whose bandwidth is known"),
        (("--gpu", "h200", "--sweep", "--context", "9"), "none of the options of steps, found --context"),
        (("--gpu", "h200", "--sweep", "--accepted", "0.5", "--layout", "8"), "--layout: expected tp, or dp for ranks"),
        (("--gpu", "h200", "--sweep", "--accepted", "0.5", "--layout", "tp8dcp4"), "--layout: expected tp, or dp for"),
        (("--gpu", "h200", "--sweep", "--accepted", "0.5", "--layout", "dp8dcp8"), "--layout: expected tp, or dp for"),
        (("--gpu", "h200", "--sweep", "--accepted", "0.5", "--layout", "dp1"), "--layout: expected tp, or dp for"),
        (("--gpu", "h200", "--sweep", "--accepted", "0.5", "--layout", "tp1x1025"), "--layout: expected tp, or dp for"),
        (
            ("--gpu", "h200", "--sweep", "--accepted", "0.5", "--layout", "tp0"),
            "--layout: expected tp, or dp for ranks",
        ),
        *(
            (("--gpu", "h200", "--sweep", "--layout", "tp2", *flag), f"--layout and {flag[0]} are mutually exclusive.")
            for flag in (("--tp-size", 2), ("--ep-size", 2), ("--dcp-size", 2), ("--attention-dp",))
        ),
        (("--gpu", "h200", "--sweep", "--acceptance-length", "2"), "found --acceptance-length. Say --accepted"),
        (("--gpu", "h200", "--sweep", "--accepted", "0.5", "--csv", "no/c.csv"), "a directory that exists"),
        (("--gpu", "h200", "--sweep", "--accepted", "0.5", "--sweep-draft-length", 2), "K of at most 1, found 2"),
        (("--gpu", "h200", "--machine", "m.json"), "--gpu NAME or --machine FILE, found both"),
        ((), "--gpu NAME, or a GPU in this machine, found neither. Name one: h100, h200, b200, b300, or its"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(pair, invoke, words, message, monkeypatch) -> None:
    monkeypatch.setattr("dflash_trt.doctor.machine.gpus", list)
    result = invoke("plan", *pair[:2], *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_unknown_gpu_without_a_memory_size_needs_a_name(pair, invoke, monkeypatch) -> None:
    monkeypatch.setattr("dflash_trt.doctor.machine.gpus", lambda: [{"name": "NVIDIA GB10", "memory_mib": "[N/A]"}])
    result = invoke("plan", *pair[:2])
    assert (result.exit_code, "--gpu NAME" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("name", "memory_mib", "planned"),
    [("NVIDIA H100 80GB HBM3", "81559", "h100"), ("NVIDIA B300 SXM6 AC", "1", "b300"), ("NVIDIA L40S", "46068", "45")],
)
def test_without_a_name_the_plan_is_for_the_gpu_of_this_machine(
    pair, invoke, monkeypatch, name, memory_mib, planned
) -> None:
    monkeypatch.setattr("dflash_trt.doctor.machine.gpus", lambda: [{"name": name, "memory_mib": memory_mib}])
    found, expected = invoke("plan", *pair[:2], "--json"), invoke("plan", *pair[:2], "--gpu", planned, "--json")
    assert f"this machine's, {name}" in found.stderr
    assert (found.exit_code, found.stdout) == (0, expected.stdout)
