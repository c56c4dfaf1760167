"""The client of examples/ against the server: its text is that of the engine offline."""

import runpy
import sys
from typing import Any

import pytest

from dflash_trt import SamplingParams
from tests.docs.pages import ROOT


def test_the_example_prints_the_stream_of_the_server(
    server: Any, offline: Any, tritonclient: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["triton_client.py", f"127.0.0.1:{server.grpc_port}", "import os"])
    runpy.run_path(str(ROOT / "examples" / "triton_client.py"), run_name="__main__")
    expected = offline.generate(["import os"], SamplingParams(max_new_tokens=32))[0].text
    assert capsys.readouterr().out == expected + "\n"
