"""The table of `test_fields.py` over an interpreted TensorRT engine, behind Dynamo."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.servers.dynamo.serving import Server, serving
from tests.servers.dynamo.test_fields import PATHS, SCHEMA
from tests.servers.dynamo.test_fields import (
    test_a_field_is_served_or_refused_by_its_name as test_a_field_is_served_or_refused_by_its_name,
)

# Python runs this in every process that the server starts, before anything else.
SITE = """
import sys
if any(word.startswith("dflash_trt.servers") for word in sys.orig_argv):
    from tests.trt.engines import interpreted_engines
    interpreted_engines().__enter__()
"""


@pytest.fixture(scope="module")
def server(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: pip install 'dflash-trt[check]'")
    directory = tmp_path_factory.mktemp("interpreted")
    (directory / "sitecustomize.py").write_text(SITE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{directory}:{ROOT}")
        with serving(demo, directory, "--tool-call-parser", "hermes", num_replicas=1) as running:
            yield running


def test_the_engine_behind_it_is_interpreted(server: Server) -> None:
    """Modules of TensorRT's executor are in the process that serves."""
    [worker] = server.workers()
    libraries = {Path(entry.path).name for entry in worker.memory_maps()}
    assert any(name.startswith("libtensorrt_rtx") for name in libraries), sorted(libraries)


def test_a_schema_is_answered(server: Server) -> None:
    answer = server.post("completions", **PATHS["completions"] | {"max_tokens": 40, "json_schema": SCHEMA})
    assert answer.status_code == 200, answer.text
