"""`bench serve` from its command line to the load, and the rows it reads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="needs the extra 'serve'")

from dflash_trt.bench.conversation import Conversation
from dflash_trt.bench.load_report import Limits, Percentiles
from dflash_trt.bench.request_load import Load
from dflash_trt.cli.bench import bench
from dflash_trt.cli.bench_options import conversations_of
from dflash_trt.cli.bench_serve import floors_beside
from dflash_trt.cli.prompt_source import PromptSource
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.runtime_config import NODES, RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.opening import max_draft_len
from tests.bench.test_load_report import REPORT
from tests.cli.calls import Recorder, options_never_set
from tests.cli.test_options_arrive import runtime_cases
from tests.plan.test_machine_file import MACHINE

URL = "http://127.0.0.1:9"
ROWS = [{"prompt": "x", "category": "a"}, {"prompt": "y", "category": "b"}, {"prompt": "z"}]
SPEED_BENCH = {"question_id": "0" * 32, "category": "qa", "sub_category": "s", "source": "t", "difficulty": "hard"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return written(tmp_path, *ROWS)


def written(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_conversations(path: Path) -> list[Conversation]:
    return conversations_of(PromptSource(path=path).jobs(takes_turns=True))


@pytest.fixture
def sweep(monkeypatch) -> Recorder:
    from dflash_trt.bench import server_sweep

    recorder = Recorder(server_sweep.sweep_servers)
    monkeypatch.setattr(server_sweep, "sweep_servers", recorder)
    return recorder


WORDS = ["--category", "a", "--concurrency", "3", "--concurrency", "5", "--request-rate", "0.5", "--duration", "8"]
WORDS += [
    "--requests-per-client",
    "2",
    "--max-new-tokens",
    "9",
    "--temperature",
    "0.5",
    "--ignore-eos",
    "--rounds",
    "7",
]
WORDS += ["--column", "prompt=prompt", "--column", "category=category"]
WORDS += ["--goodput", "ttft:500, tpot:20,e2el:3000", "--num-gpus", "2", "--model-name", "m"]
SPLIT = ["--split", "test"]
WORDS += ["--num-prompts", "3"]
REPORTS = [
    "--hardware",
    "h",
    "--machine",
    "m",
    "--interactivity",
    "5",
    "--csv",
    "c",
    "--figure",
    "f.svg",
    "--json",
    "--autoregressive",
]
RUNTIME_CASES = runtime_cases(
    *("use_drafter", "enable_prefix_caching", "num_state_snapshots", "max_queue_len", "seed"),
    *("host_cache_bytes", "disk_cache_dir", "disk_cache_bytes", "publish_prompts", *NODES),
)


def test_every_option_of_the_load_reaches_it(rows, sweep, invoke) -> None:
    assert invoke("bench", "serve", f"s={URL}/v1/", "--input-file", rows, *WORDS).stderr == "error: recorded\n"
    (side,) = sweep.arguments.pop("sides")
    with side.open() as url:
        assert (url, side.name, side.num_gpus, side.model) == (URL, "s", 2, "m")
    assert callable(sweep.arguments.pop("progress"))
    closed = [Load(num_conversations=6, concurrency=3), Load(num_conversations=10, concurrency=5)]
    assert sweep.arguments == {
        "conversations": [Conversation(prompt="x", category="a")],
        "loads": [*closed, Load(num_conversations=4, request_rate_per_s=0.5)],
        "fields": {"max_tokens": 9, "temperature": 0.5, "ignore_eos": True},
        "limits": Limits(time_to_first_token_s=0.5, time_per_output_token_s=0.02, end_to_end_s=3.0),
        "num_rounds": 7,
    }
    minimal = [URL, "--input-file", "rows"]
    never_set = options_never_set(
        bench.commands["serve"], minimal, *([*minimal, *words] for words in (WORDS, REPORTS, SPLIT))
    )
    of_engines = options_never_set(
        bench.commands["serve"], minimal, *([*minimal, *words] for words, _ in RUNTIME_CASES)
    )
    assert never_set & of_engines == {"sources", "input_file"}


def test_without_a_rate_five_concurrencies_are_measured(rows, sweep, invoke) -> None:
    invoke("bench", "serve", URL, "--input-file", rows)
    assert [load.concurrency for load in sweep.arguments["loads"]] == [1, 2, 4, 8, 16]
    invoke("bench", "serve", URL, "--input-file", rows, "--request-rate", "2")
    assert sweep.arguments["loads"] == [Load(num_conversations=60, request_rate_per_s=2.0)]


def test_an_engine_is_served_with_its_options_and_once_more_without_its_drafter(
    rows, sweep, invoke, monkeypatch
) -> None:
    pytest.importorskip("dynamo.common.backend", reason="needs the extra 'serve'")
    opened = []

    def settings(engine_dir: Path, runtime: RuntimeConfig):
        opened.append((engine_dir, runtime))
        return "settings", "engine"

    monkeypatch.setattr("dflash_trt.cli.serve.worker_settings", settings)
    for words, config in RUNTIME_CASES:
        opened.clear()
        invoke("bench", "serve", "some/e", "f=g", URL, "--autoregressive", "--input-file", rows, *words)
        names = [side.name for side in sweep.arguments["sides"]]
        assert names == ["e, autoregressive", "f, autoregressive", "e", "f", URL]
        config = config.replaced(enable_prefix_caching=False)
        for name, (plain, drafted) in {"some/e": opened[:2], "g": opened[2:]}.items():
            assert plain == (Path(name), config.without_drafter())
            assert drafted == (Path(name), config)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([URL, URL], "distinct names"),
        ([URL, "--autoregressive"], "an engine directory"),
        ([URL, "--goodput", "itl:3"], "ttft, tpot, e2el with milliseconds"),
        *(
            ([URL, "--goodput", f"ttft:{wrong}"], "milliseconds, more than 0")
            for wrong in ("nan", "inf", "0", "-5", "")
        ),
        ([URL, "--figure", "f.pdf"], "ends with .png or .svg"),
        ([URL, "--csv", "no/such/directory/t.csv"], "a directory that exists"),
        ([URL, "--category", "c"], "found a, b"),
        ([URL, *SPLIT], "--split: expected a directory of a data set"),
        ([URL, "--column", "text"], "--column: expected FIELD=COLUMN"),
        (["no/engine"], "no/engine"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(words, message, rows, sweep, invoke) -> None:
    ran = invoke("bench", "serve", *words, "--input-file", rows)
    assert ran.exit_code != 0 and message in ran.stderr, ran.stderr
    assert not sweep.arguments


def test_reports_are_printed_and_written(rows, tmp_path, invoke, monkeypatch) -> None:
    fast = replace(REPORT, server="fast", tok_per_s_per_user=Percentiles(mean=200, p50=200, p90=200, p99=200))
    monkeypatch.setattr("dflash_trt.bench.server_sweep.sweep_servers", lambda *_, **__: [REPORT, fast])
    csv = tmp_path / "t.csv"
    words = ["--csv", csv, "--hardware", "a laptop", "--interactivity", "50"]
    ran = invoke("bench", "serve", URL, "--input-file", rows, *words)
    assert ran.exit_code == 0, ran.stderr
    assert "At 50 tok/s per user, throughput relative to s: fast 1.0x." in ran.stdout
    assert f"command: dflash-trt bench serve {URL}" in ran.stdout and "hardware: a laptop" in ran.stdout
    assert [line.split(",")[0] for line in csv.read_text().splitlines()] == ["server", "s", "fast"]
    assert "tok/s per server" in ran.stdout
    of_gpus = invoke("bench", "serve", URL, "--input-file", rows, "--num-gpus", 2).stdout
    assert "tok/s per GPU" in of_gpus and "At 50 tok/s" not in of_gpus and "relative to s: fast" in of_gpus
    monkeypatch.setattr("dflash_trt.bench.server_sweep.sweep_servers", lambda *_, **__: [REPORT])
    assert "relative to" not in invoke("bench", "serve", URL, "--input-file", rows, "--interactivity", 50).stdout
    monkeypatch.setattr("dflash_trt.bench.server_sweep.sweep_servers", lambda *_, **__: [REPORT, fast])
    told = json.loads(invoke("bench", "serve", URL, "--input-file", rows, "--json").stdout)
    assert told["hardware"] == "not stated" and [report["server"] for report in told["reports"]] == ["s", "fast"]


def test_a_figure_has_the_facts_of_its_measurement(rows, tmp_path, invoke, monkeypatch) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'figures'")
    monkeypatch.setattr("dflash_trt.bench.server_sweep.sweep_servers", lambda *_, **__: [REPORT])
    figure, picture = tmp_path / "f.svg", tmp_path / "f.png"
    words = ["--hardware", "a laptop", "--interactivity", "50"]
    for path in (figure, picture):
        assert invoke("bench", "serve", URL, "--input-file", rows, "--figure", path, *words).exit_code == 0
    drawn = figure.read_text()
    assert "At 50 tok/s" in drawn and "Hardware: a laptop" in drawn and "Workload: 3 rows of rows.jsonl" in drawn
    assert picture.stat().st_size > 10_000


def test_rows_of_speed_bench_are_sent_turn_by_turn(tmp_path) -> None:
    system = {"role": "system", "content": "s"}
    found = read_conversations(
        written(
            tmp_path,
            SPEED_BENCH | {"turns": ["one", "two"]},
            SPEED_BENCH | {"messages": [system, user("one"), user("two")]},
            SPEED_BENCH | {"messages": [user("one"), {"role": "assistant", "content": "a"}, user("two")]},
            {"messages": [user("one"), user("two")], "chat_template_kwargs": {"a": 1}, "category": "qa"},
            {"prompt_token_ids": [1, 2], "temperature": 0.5, "category": "qa"},
        )
    )
    assert [one.turns for one in found[:2]] == [
        ((user("one"),), (user("two"),)),
        ((system, user("one")), (user("two"),)),
    ]
    assert [len(one.turns) for one in found[2:]] == [1, 1, 0], "answers that are there, and rows of `run`, go at once"
    assert found[0].category == "qa" and found[3].fields == {"chat_template_kwargs": {"a": 1}}
    assert found[4] == Conversation(prompt=[1, 2], category="qa")


def test_a_load_that_takes_few_rows_has_its_share_of_every_category(tmp_path) -> None:
    rows = [{"prompt": f"{name}{index}", "category": name} for name in "ab" for index in range(2)]
    found = read_conversations(written(tmp_path, *rows, {"prompt": "c"}))
    assert [one.prompt for one in found] == ["a0", "b0", "c", "a1", "b1"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            SPEED_BENCH | {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]},
            "prepare",
        ),
        (SPEED_BENCH | {"turns": [1]}, "a list of texts"),
        ({"messages": 3}, "a list of objects"),
        ({"prompt": "x", "category": 3}, "category"),
        ({"prompt": "x", "source": "s"}, "'source' is unknown"),
        ([], "a JSON object"),
    ],
)
def test_a_row_that_is_wrong_is_refused(row, message, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_conversations(written(tmp_path, {"prompt": "x"}, row))


def test_closed_loads_on_engines_have_the_floor_of_their_step_beside_them(engine_dir) -> None:
    runtime = RuntimeConfig(num_threads=1)
    engines = {
        "e": (engine_dir, runtime.replaced(draft_length=3)),
        "e, autoregressive": (engine_dir, runtime.without_drafter()),
    }
    counts = {"num_requests": 4, "num_prompt_tokens": 40, "num_output_tokens": 80, "concurrency": 2}
    closed = replace(REPORT, server="e", output_tok_per_s=10.0, **counts)
    reports = [
        closed,
        replace(closed, server="e, autoregressive", acceptance=None),
        replace(closed, server="a URL"),
        replace(closed, concurrency=None, request_rate_per_s=1.0),
        replace(closed, num_requests=0),
    ]
    drafting, plain, *others = floors_beside(reports, engines, MACHINE)
    assert others == [None] * 3
    assert drafting is not None and plain is not None
    assert (drafting.num_requests, drafting.context_len, drafting.machine) == (2, 10 + 20 // 2, MACHINE.name)
    assert (drafting.num_draft_tokens, plain.num_draft_tokens) == (max_draft_len(EngineDir.open(engine_dir)), 0)
    [adaptive] = floors_beside([closed], {"e": (engine_dir, runtime)}, MACHINE)
    assert adaptive is not None and "K >= 2" in str(adaptive)  # the fewest that give its acceptance length
    assert plain.reached_fraction == pytest.approx(10.0 / plain.floor_tok_per_s)
    assert str(drafting).startswith("e, 2 clients: floor of a step (2 x 20 tokens")
