"""The demo pair in float32, whose texts do not depend on the batch: as an engine, in this process, behind Dynamo."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.serving.llm import LLM
from tests.docs.pages import ROOT
from tests.servers.dynamo.serving import Server, serving

DEMO = ROOT / "dflash_trt" / "demo"


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("dynamo.common.backend", reason="needs the extra 'serve'")
    engine = tmp_path_factory.mktemp("engines") / "demo"
    config = BuildConfig(target=str(DEMO / "target"), drafter=str(DEMO / "drafter"), dtype="float32")
    build_engine(config, engine, base_dir=DEMO, overwrite=False, command=["test"], progress=lambda _: None)
    return engine


@pytest.fixture(scope="package")
def server(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(
        demo, tmp_path_factory.mktemp("serve"), "--tool-call-parser", "hermes", "--draft-length", "7"
    ) as running:
        yield running


@pytest.fixture(scope="package")
def offline(demo: Path) -> Iterator[LLM]:
    with LLM(demo, num_threads=1, draft_length=7) as llm:  # as the server: tests count drafts
        yield llm
