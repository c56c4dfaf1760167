"""A service of backend tensorrt_llm: the real front end, a replica, and the stand-in of TensorRT-LLM behind it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dflash_trt.cli.main import cli
from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.request import SamplingParams
from dflash_trt.engine_dir import EngineDir
from dflash_trt.serving.tensorrt_llm.engine import PYTHON
from tests.factories import make_zlab_drafter
from tests.servers.dynamo.conftest import DEMO
from tests.servers.dynamo.serving import Server, serving
from tests.serving.trtllm_environment import stand_in_python

PROMPT = "def fibonacci(n):\n"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineDir]:
    """With the stand-in in its environment."""
    pytest.importorskip("dynamo.common.backend", reason="needs the extra 'serve'")
    base = tmp_path_factory.mktemp("trtllm")
    target = DEMO / "target"
    drafter = make_zlab_drafter(base / "drafter", target_dir=target)  # the demo's own is DFlash2, which it refuses
    config = BuildConfig(target=str(target), drafter=str(drafter), backend="tensorrt_llm", max_num_tokens=2048)
    engine = build_engine(
        config, base / "demo", base_dir=DEMO, overwrite=False, command=["test"], progress=lambda _: None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PYTHON, stand_in_python(base / "venv"))
        patch.setenv("STAND_IN_LOG", str(base / "told.jsonl"))
        patch.delenv("PYTHONPATH", raising=False)  # the other interpreter finds its own
        yield engine


@pytest.fixture(scope="module")
def server(engine: EngineDir) -> Iterator[Server]:
    with serving(engine.path, engine.path.parent, num_replicas=1, num_threads=None) as running:
        yield running


def test_texts_are_those_of_the_torch_engine(server, offline) -> None:
    """Tokens of the stand-in are transformers'; text, stop strings and usage are made by the replica."""
    whole = offline.generate(PROMPT, SamplingParams(max_new_tokens=40))
    answer = server.post("completions", prompt=PROMPT, max_tokens=40, temperature=0).json()
    assert answer["choices"][0]["text"] == whole.text
    assert answer["usage"]["completion_tokens"] == len(whole.token_ids)
    stop = whole.text[10:14]
    stopped = server.post("completions", prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop]).json()
    assert stopped["choices"][0]["text"] == whole.text[: whole.text.index(stop)]


def test_a_stream_is_the_text_in_pieces(server, offline) -> None:
    fields = {"model": "demo", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    chunks = list(server.client().completions.create(**fields, stream=True))
    assert (
        "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        == offline.generate(PROMPT, SamplingParams(max_new_tokens=40)).text
    )


def test_what_the_backend_refuses_is_named(server) -> None:
    answer = server.post("completions", prompt=PROMPT, max_tokens=4, logit_bias={"40": 5})
    assert answer.status_code == 400 and "logit_bias" in answer.text, answer.text


@pytest.mark.slow  # starts two more services
def test_bench_serve_measures_it_with_drafts_and_without(engine: EngineDir, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "def fibonacci(n):"}\n')
    words = ["bench", "serve", engine.path, "--autoregressive", "--input-file", tmp_path / "rows.jsonl", "--json"]
    words += ["--concurrency", 2, "--requests-per-client", 1, "--rounds", 1, "--max-new-tokens", 12]
    result = CliRunner().invoke(cli, list(map(str, words)))
    assert result.exit_code == 0, result.output
    plain, drafting = json.loads(result.stdout)["reports"]
    assert [report["num_errors"] for report in (plain, drafting)] == [0, 0]
    assert plain["acceptance"] is None and drafting["acceptance"]["length"] > 1
    assert plain["output_tok_per_s"] > 0 and drafting["roofline"] is not None
