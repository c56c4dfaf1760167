"""`dflash-trt plan --gpus`: the choice, its costs, the commands that it prints, and refusals."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.cli.build import merged_config
from dflash_trt.cli.main import cli
from dflash_trt.cli.plan import _NOT_OF_PLANS
from dflash_trt.cli.plan_advice import BuildCommand, _distinct
from dflash_trt.core.draft_lengths import draft_lengths
from dflash_trt.plan.planning import plan_engine
from dflash_trt.simulation.advice import Choice
from scripts.published_shapes import write_shape
from tests.cli.conftest import Invoke
from tests.cli.test_options_arrive import BUILD, COLLECTIVES, TENSORRT
from tests.plan.test_attention_dp_plan import advice
from tests.plan.test_machine_file import MACHINE
from tests.plan.test_step_floor import DRAFTER, QWEN3_8B, write

NODE = ("--gpu", "h200", "--gpus", 4, "--max-seq-len", 4096)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("published")
    return write(root, "target", QWEN3_8B), write(root, "drafter", DRAFTER)


def advise(invoke: Invoke, *words: Any) -> dict[str, Any]:
    result = invoke("plan", *words, "--json")
    assert result.exit_code == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    assert result.stdout == json.dumps(report, indent=2) + "\n"
    return report


def test_the_best_comes_first_with_alternatives_and_one_without_a_drafter(pair, invoke) -> None:
    report = advise(invoke, *pair, *NODE, "--per-user", 200, "--price", 3.6)
    first, *others = report["choices"]
    speeds = [
        choice["output_tok_per_s"] / (1.1 if choice["num_prefill_workers"] else 1.0) for choice in report["choices"]
    ]
    assert others and speeds == sorted(speeds, reverse=True)
    assert all(choice["tok_per_s_per_user"] >= 200 for choice in report["choices"])
    assert {choice["has_drafter"] for choice in report["choices"]} == {True, False}
    cost = 1e6 * 3.6 * 4 / 3600 / first["output_tok_per_s"]
    assert first["price_per_million_tokens"] == pytest.approx(cost)
    assert [item["factor"] for item in report["sensitivity"]] == [0.85, 1.0, 1.1]
    speeds = [item["tok_per_s_per_user"] for item in report["sensitivity"]]
    assert speeds == sorted(speeds)


def test_a_target_alone_has_no_acceptance_and_no_drafts(pair, invoke) -> None:
    report = advise(invoke, pair[0], "--gpu", "h200", "--gpus", 1, "--max-batch-size", 8, "--max-num-tokens", 2048)
    assert (report["accepted"], report["is_acceptance_assumed"], report["sensitivity"]) == (None, False, [])
    assert {(choice["has_drafter"], choice["num_draft_tokens"]) for choice in report["choices"]} == {(False, 0)}


def test_the_commands_are_commands_and_have_the_choice_in_them(pair, invoke) -> None:
    report = advise(invoke, *pair, *NODE)
    build, serve = (shlex.split(command)[1:] for command in report["commands"])
    for words in (build, serve):
        command = cli.commands[words[0]]
        context = command.make_context(words[0], list(words[1:]), resilient_parsing=False)
        assert context.params
    first = report["choices"][0]
    assert ("--quantization" in build) == (first["format"] is not None)
    assert serve[serve.index("--gpus") + 1] == "0,1,2,3"
    table = draft_lengths(serve[serve.index("--draft-length") + 1])
    assert table == {int(size): length for size, length in report["draft_lengths"].items()}


def test_the_commands_keep_what_was_given_and_leave_out_what_the_choice_decides(pair, invoke) -> None:
    given = ("--kv-cache", "fp8", "--page-size", 64, "--tp-size", 2)
    build = shlex.split(advise(invoke, *pair, *NODE, *given, "--max-draft-len", 5)["commands"][0])
    alone = shlex.split(advise(invoke, pair[0], *NODE, *given)["commands"][0])
    for command in (build, alone):
        options = dict(zip(command[2::2], command[3::2], strict=True))
        assert (options["--kv-cache"], options["--page-size"], options["--max-seq-len"]) == ("fp8", "64", "4096")
        assert command.count("--target") == 1 and command.count("--tp-size") <= 1
    assert build[build.index("--max-draft-len") + 1] == "5" and alone[alone.index("--drafter") + 1] == "none"


def test_prefill_workers_that_pay_are_named_and_served(pair, invoke) -> None:
    """Long prompts, and users who shall not wait for those of others."""
    node = ("--gpu", "h200", "--gpus", 8, "--max-seq-len", 16384, "--prompt-tokens", 8000, "--output-tokens", 256)
    report = advise(invoke, pair[0], *node, "--per-user", 200)
    first, others = report["choices"][0], [item["num_prefill_workers"] for item in report["choices"][1:]]
    number = first["num_prefill_workers"]
    assert number > 0 and 0 in others and first["layout"] == "tp2x4"
    words = shlex.split(report["commands"][1])
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options["--gpus"] == "0,1,2,3,4,5,6,7", "of all replicas, with two ranks each"
    assert options["--prefill-workers"] == str(number) and options["--host-cache-bytes"].endswith("GiB")
    bytes_per_prompt = 8000 * 147456 // 2  # of each of two ranks
    host_bytes = options["--host-cache-bytes"].removesuffix("GiB")
    assert int(host_bytes) == round(first["num_requests"] * bytes_per_prompt / 2**30) > 1, "of all that run at once"
    assert any("K/V go from prefill workers through files" in text for text in report["assumptions"])


def test_the_command_of_every_layout_builds_it(tmp_path: Path) -> None:
    found = advice(tmp_path, "openai/gpt-oss-120b")
    pair = read_pair(write_shape(tmp_path / "again", "openai/gpt-oss-120b"), None)
    given = {"target": ("--target", "t"), "max_seq_len": ("--max-seq-len", "2048")}
    for layout in found:
        words = shlex.split(BuildCommand(None, given).of(Choice(layout=layout, speed=layout.best_k(1))))
        flags = dict(cli.commands["build"].make_context("build", words[2:]).params)
        for name in ("config_file", "output", "checked_layers", "overwrite", "as_json"):
            del flags[name]
        made = plan_engine(merged_config(None, flags)[0], pair, layout.made.gpu)
        assert made.pretrained_config == layout.made.pretrained_config, layout.name
        assert made.build_config == layout.made.build_config, layout.name
    assert {"dp4ep4x1", "tp4ep4x1", "tp1x4"} <= {layout.name for layout in found}


@pytest.mark.parametrize("words", [[*BUILD, "--drafter-override", "x=[1, 2]"], TENSORRT, COLLECTIVES], ids=len)
def test_every_option_of_build_is_in_the_command_as_it_was_given(words: list[str], monkeypatch) -> None:
    """Those that the choice decides are left out; here it decides nothing."""
    monkeypatch.setattr("dflash_trt.cli.plan_advice._CHOSEN", ())
    flags = dict(cli.commands["build"].make_context("build", list(words)).params)
    flags |= dict.fromkeys(_NOT_OF_PLANS)
    mapping = SimpleNamespace(world_size=1, dp_size=1, ep_size=1, dcp_size=1)
    made = SimpleNamespace(
        pretrained_config=SimpleNamespace(mapping=mapping),
        build_config=SimpleNamespace(
            max_batch_size=flags["max_batch_size"] or 1, max_num_tokens=flags["max_num_tokens"] or 2
        ),
    )
    choice: Any = SimpleNamespace(layout=SimpleNamespace(has_drafter=True, made=made, format=None))
    command = shlex.split(BuildCommand.given("pair.yaml", flags).of(choice))
    assert command[:3] == ["dflash-trt", "build", "pair.yaml"]
    found = cli.commands["build"].make_context("build", command[2:]).params
    limits = {"max_batch_size": found["max_batch_size"], "max_num_tokens": found["max_num_tokens"]}
    of_plans = flags.keys() - _NOT_OF_PLANS
    assert {name: found[name] for name in of_plans} == {name: (flags | limits)[name] for name in of_plans}
    assert (found["config_file"], found["output"]) == ("pair.yaml", Path("build/engine"))


def test_a_throughput_is_reached_with_the_most_for_each_user(pair, invoke) -> None:
    most = advise(invoke, *pair, *NODE)["choices"][0]
    half = most["output_tok_per_s"] / 2
    choices = advise(invoke, *pair, *NODE, "--throughput", half)["choices"]
    assert all(choice["output_tok_per_s"] >= half for choice in choices)
    together = [choice for choice in choices if choice["has_drafter"] and not choice["num_prefill_workers"]]
    speeds = [choice["tok_per_s_per_user"] for choice in together]
    assert speeds == sorted(speeds, reverse=True) and speeds[0] > most["tok_per_s_per_user"]


def test_alternatives_are_the_best_of_each_layout_and_of_each_format() -> None:
    def choice(name: str, weights: str | None = None, *, drafts: bool = True, prefill: int = 0) -> Any:
        layout = SimpleNamespace(name=name, format=weights, has_drafter=drafts, num_prefill_workers=prefill)
        return SimpleNamespace(layout=layout, words=f"{name} {weights} {drafts} {prefill}")

    best = [choice("a", "fp8"), choice("a"), choice("b", "fp8"), choice("b"), choice("a", "fp8", drafts=False)]
    assert _distinct(best) == [best[0], best[1], best[2], best[4]]
    assert _distinct(best[::-1]) == [best[4], best[3], best[1]], "fp8 without a drafter, then each layout's best"
    apart = [choice(name, "fp8", prefill=2) for name in "cd"]
    assert _distinct([*apart, *best]) == [apart[0], best[0], best[1], best[2], best[4]]
    many = [choice(name) for name in "abcdefgh"]
    plain = [choice(name, drafts=False) for name in "abc"]
    assert _distinct([*many, *plain]) == [*many[:4], *plain[:2]]
    assert _distinct([*apart, *many, *plain]) == [apart[0], *many[:3], *plain[:2]]
    assert _distinct([choice(name, drafts=False) for name in "abcdefgh"])[-1].layout.name == "f"


def test_a_refusal_names_what_is_reached_and_nothing_beyond_it(pair, invoke) -> None:
    told = invoke("plan", *pair, *NODE, "--ttft", 1e-3).stderr
    numbers = re.search(r"at most (\d+) tok/s, and a first token in ([\d.]+) ms at best.* at most (\d+) tok/s", told)
    assert numbers is not None, told
    for option, number, within in zip(
        ("--per-user", "--ttft", "--throughput"), numbers.groups(), (-1, 1, -1), strict=True
    ):
        for side, is_reached in ((within, True), (-within, False)):
            result = invoke("plan", *pair, *NODE, option, float(number) * (1 + 0.05 * side))
            assert (result.exit_code == 0) == is_reached, (option, number, side)


def test_the_sensitivity_begins_from_the_choice(pair, invoke) -> None:
    report = advise(invoke, *pair, *NODE, "--per-user", 200)
    first, (_, same, _) = report["choices"][0], report["sensitivity"]
    assert {name: same[name] for name in first} == first


def test_a_refusal_has_the_best_of_all_layouts(pair, invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def layout(per_user: float, first_s: float, most: float) -> SimpleNamespace:
        speed = SimpleNamespace(
            tok_per_s_per_user=per_user, time_to_first_token_s=first_s, output_tok_per_s=most, num_requests=1
        )
        return SimpleNamespace(best_k={1: speed}.__getitem__, by_batch_size={1: speed})

    found = [layout(50, 0.02, 900), layout(70, 0.03, 800)]
    monkeypatch.setattr("dflash_trt.simulation.advice.layouts", lambda *given: (found, []))
    told = invoke("plan", *pair, *NODE, "--ttft", 1).stderr
    assert "A single user gets at most 70 tok/s, and a first token in 20.0 ms at best." in told
    assert "All users together get at most 900 tok/s." in told


def test_a_measured_machine_is_what_the_times_rest_on(pair, invoke, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(MACHINE.model_copy(update={"memory_bytes": 64 << 30}).text())
    report = advise(invoke, pair[0], "--machine", path, "--gpus", 1, "--max-seq-len", 1024, "--prompt-tokens", 100)
    assert report["assumptions"] == ["step times are from the machine file, one device a rank"]


def test_the_page_says_that_nothing_was_measured_and_what_was_assumed(pair, invoke) -> None:
    result = invoke("plan", *pair, *NODE, "--ttft", 100)
    assert result.exit_code == 0, result.stderr
    assert "on 4 x h200 for a first token in 100 ms" in result.stdout
    assert "calculated, not measured" in result.stdout
    assert "assumed: 80% of drafts are accepted after an accepted one; --accepted takes" in result.stdout
    assert "K by requests of a replica: 1:" in result.stdout
    told = invoke("plan", *pair, *NODE, "--accepted", "0.9,0.8,0.7")
    assert "drafts are accepted after" not in told.stdout
    alone = invoke("plan", pair[0], *NODE)
    assert alone.exit_code == 0 and "K by requests" not in alone.stdout and "accepted" not in alone.stdout


def test_large_batches_are_looked_at_unless_limits_are_told(pair, invoke) -> None:
    free = advise(invoke, *pair, *NODE)
    bound = advise(invoke, *pair, *NODE, "--max-batch-size", 16)
    assert max(choice["num_requests"] for choice in free["choices"]) > 64
    assert max(choice["num_requests"] for choice in bound["choices"]) == 16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*NODE, "--per-user", 1e6), "expected 1e+06 tok/s per user, found no engine that is as fast. A single user"),
        (("--gpu", "h200", "--price", 3), "expected --gpus with its options, found --price. Add --gpus N."),
        (("--gpu", "h200", "--throughput", 3), "expected --gpus with its options, found --throughput"),
        ((*NODE, "--throughput", 1e9), "expected 1e+09 tok/s in all, found no engine that is as fast"),
        (("--gpu", "h200", "--ttft", 3), "expected --gpus with its options, found --ttft"),
        ((*NODE, "--sweep"), "expected --sweep or --gpus, found both"),
        ((*NODE, "--layout", "tp2"), "expected --sweep with its options, found --layout"),
        ((*NODE, "--context", 100), "--gpus: expected none of the options of steps, found --context"),
        (("--gpu", "80", "--gpus", 2), "expected a machine whose bandwidth is known, found GPU of 80 GiB"),
        ((*NODE, "--per-user", 1, "--per-user", 2), "expected one --per-user and one --accepted, found several"),
    ],
)
def test_what_cannot_be_answered_is_refused(pair, invoke, words: tuple[Any, ...], message: str) -> None:
    result = invoke("plan", *pair, *words)
    assert result.exit_code != 0 and message in result.stderr, result.stderr
