"""Builds from names on the Hugging Face hub, over huggingface_hub as it is and a stand-in for its server."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from dflash_trt.checkpoint import sources
from dflash_trt.checkpoint.hub import download_description, download_tensors
from dflash_trt.checkpoint.sources import CheckpointSources, find_checkpoints
from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import CheckpointError, ConfigError, DFlashError
from dflash_trt.core.known_pairs import HubName, KnownPair
from dflash_trt.engine_dir import EngineDir
from tests.cli.conftest import Invoke, invoke  # noqa: F401 - a fixture
from tests.factories import make_target, make_zlab_drafter, read_json, write_json
from tests.hub_server import Hub, commit_of, point_at, serving

TARGET, DRAFTER = "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("checkpoints")
    target = make_target(base / "target", max_shard_size="100KB")
    make_zlab_drafter(base / "drafter", target_dir=target)
    make_zlab_drafter(base / "tagged", target_dir=target, seed=9)
    (base / "target" / "original").mkdir()
    for unread in ("target/original/model.safetensors", "target/pytorch_model.bin", "drafter/dflash.py"):
        (base / unread).write_text("not read")
    (base / "drafter" / "README.md").write_text("# A drafter\n")
    make_target(base / "wide", hidden_size=96)
    return base


@pytest.fixture
def hub(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The known pair, a gated copy of the target, and targets of other names; nothing is in the cache."""
    with serving(Hub()) as hub:
        hub.add(TARGET, checkpoints / "target")
        hub.add(DRAFTER, checkpoints / "drafter", tagged=checkpoints / "tagged")
        hub.add("meta-llama/Llama-3.1-8B-Instruct", checkpoints / "target", is_gated=True)
        hub.add("someone/tuned", checkpoints / "target")
        hub.add("someone/wide", checkpoints / "wide")
        point_at(hub, tmp_path / "cache", monkeypatch)
        monkeypatch.chdir(tmp_path)
        yield hub


def find(target: str = TARGET, needs_tensors: bool = True, **fields: Any) -> CheckpointSources:
    return find_checkpoints(BuildConfig(target=target, **fields), Path.cwd(), needs_tensors=needs_tensors)


def refused(kind: type[DFlashError], *names: str, **fields: Any) -> str:
    with pytest.raises(kind) as error:
        find(*names, **fields)
    assert type(error.value) is kind
    return str(error.value)


def test_a_name_is_built_as_its_directory_is(hub: Hub, checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:  # noqa: F811
    built = invoke("build", "--target", TARGET, "--drafter", DRAFTER, "-o", "engine", "--dtype", "float32")
    assert built.exit_code == 0, built.stderr
    assert f"target: {TARGET} from the Hugging Face hub\n" in built.stderr
    local = build_engine(
        BuildConfig(target="target", drafter="drafter", dtype="float32"),
        tmp_path / "local",
        base_dir=checkpoints,
        overwrite=False,
        command=("build",),
        progress=lambda progress: None,
    )
    named = EngineDir.open(tmp_path / "engine")
    assert named.manifest.files == local.manifest.files
    source = {"name": DRAFTER, "commit": commit_of(checkpoints / "drafter")}
    provenance = named.provenance()
    assert provenance["hub"]["drafter"] == source
    assert all(Path(path).name in hub.files for path in provenance["inputs"])
    assert f"drafter: {DRAFTER} at {source['commit']}, in " in invoke("inspect", "engine").stdout


def test_only_files_that_are_read_are_downloaded_and_once(hub: Hub, checkpoints: Path) -> None:
    find(drafter=DRAFTER)
    shards = set(read_json(checkpoints / "target/model.safetensors.index.json")["weight_map"].values())
    assert len(shards) > 1
    named = "config.json config.json generation_config.json model.safetensors README.md model.safetensors.index.json"
    assert sorted(hub.files) == sorted([*shards, *named.split(), "tokenizer.json", "tokenizer_config.json"])
    hub.files.clear()
    find(drafter=DRAFTER)
    assert hub.files == []


def test_the_hub_is_not_asked_for_tensors_that_are_there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    name = HubName(repository=DRAFTER)
    described = download_description(name, role="drafter")
    download_tensors(name, described, role="drafter")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked"))
    download_tensors(name, described, role="drafter")


def test_tensors_are_those_of_the_commit_that_the_configs_had(hub: Hub, checkpoints: Path) -> None:
    name = HubName(repository=DRAFTER)
    described = download_description(name, role="drafter")
    hub.add(DRAFTER, checkpoints / "tagged", before=checkpoints / "drafter")  # somebody has pushed to main
    download_tensors(name, described, role="drafter")
    tensors = (described.path / "model.safetensors").read_bytes()
    assert tensors == (checkpoints / "drafter/model.safetensors").read_bytes()


def test_the_drafter_mtp_of_a_name_is_in_its_own_snapshot(hub: Hub) -> None:
    found = find(drafter="mtp", needs_tensors=False)
    assert found.paths["drafter"] == found.paths["target"] and found.hub.keys() == {"target"}


@pytest.mark.parametrize("revision", ["tagged", "refs/pr/1"])
def test_a_revision_may_be_a_tag_or_a_reference(hub: Hub, checkpoints: Path, revision: str) -> None:
    hub.add(DRAFTER, checkpoints / "drafter", **{revision: checkpoints / "tagged"})
    found = find(drafter=f"{DRAFTER}@{revision}").hub["drafter"]
    assert (found.name, found.commit) == (f"{DRAFTER}@{revision}", commit_of(checkpoints / "tagged"))


def test_tensors_are_downloaded_only_for_a_pair_that_fits_and_a_build(hub: Hub) -> None:
    assert "hidden_size" in refused(ConfigError, "someone/wide", drafter=DRAFTER)
    find(needs_tensors=False)
    assert not any(name.endswith(".safetensors") for name in hub.files)


def test_the_known_drafter_of_a_name_is_the_default(hub: Hub, checkpoints: Path) -> None:
    found = find()
    assert found.config.drafter == DRAFTER
    assert found.hub["drafter"].commit == commit_of(checkpoints / "drafter")
    (note,) = found.notes
    assert note.startswith(
        f"drafter: {DRAFTER}, the known one of {TARGET}; --drafter takes deepseek-ai/dspark_qwen3_8b_"
    )
    assert note.endswith(", RedHatAI/Qwen3-8B-speculator.dflash, RedHatAI/Qwen3-8B-speculator.eagle3, too")
    for none in (None, "none"):
        assert find(drafter=none).paths.keys() == {"target"}
    message = refused(ConfigError, "someone/tuned")
    assert (
        "expected one known drafter that this version reads, found none. Pass --drafter NAME, --drafter mtp" in message
    )
    assert f"{TARGET} with {DRAFTER}" in message
    needy = refused(ConfigError, "meta-models/Muse-Glimmer-30B")
    assert "found z-lab/Muse-Glimmer-30B-DFlash2, which needs the family muse_glimmer" in needy


def test_of_several_known_drafters_none_is_taken_for_granted(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [KnownPair(targets=(TARGET,), drafter=f"owner/{name}", source="a page") for name in ("a", "b")]
    monkeypatch.setattr(sources, "pairs_of_target", lambda name: (*pairs, pairs[0].model_copy(update={"needs": "c"})))
    assert "found several: owner/a, owner/b. Pass --drafter NAME" in refused(ConfigError)
    assert hub.files == []


def test_a_known_drafter_of_another_target_is_refused_before_any_download(hub: Hub) -> None:
    message = refused(ConfigError, "Qwen/Qwen3-4B", drafter=DRAFTER)
    assert (
        f"drafter {DRAFTER}: expected target {TARGET}, found Qwen/Qwen3-4B. Pass --drafter z-lab/Qwen3-4B-DF" in message
    )
    assert hub.files == []
    (note,) = find("someone/tuned", drafter=DRAFTER).notes
    assert note.startswith(f"drafter: {DRAFTER} is known for {TARGET} and Qwen/Qwen3-8B-FP8 and ")
    assert note.endswith(", not for someone/tuned")


def test_a_revision_follows_the_name(hub: Hub, checkpoints: Path) -> None:
    commit = commit_of(checkpoints / "tagged")
    for revision in ("tagged", commit):
        source = find(drafter=f"{DRAFTER}@{revision}").hub["drafter"]
        assert (source.name, source.commit) == (f"{DRAFTER}@{revision}", commit)
    message = refused(ConfigError, drafter=f"{DRAFTER}@v9")
    assert f"drafter {DRAFTER}@v9: expected a branch, tag or commit of {DRAFTER}, found none named v9." in message


def test_a_local_directory_wins_over_a_name(hub: Hub, checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoints / "target", tmp_path / TARGET)
    found = find(drafter=DRAFTER)
    assert found.paths["target"] == tmp_path / TARGET
    assert found.hub.keys() == {"drafter"}
    assert found.notes == (f"target: the directory {tmp_path / TARGET}, not the repository of that name on the hub",)
    assert find().paths.keys() == {"target"}, "a directory has no default drafter"


def test_a_name_that_is_neither_says_both_and_the_known_pairs(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(ConfigError, "someone/nothing", drafter=DRAFTER)
    assert "target someone/nothing: expected a local directory, or a repository of the Hugging Face hub" in message
    assert "found neither (private repositories need a token)" in message
    assert f"Known pairs: Qwen/Qwen3-4B with z-lab/Qwen3-4B-DFlash-b16; {TARGET} with {DRAFTER}" in message
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert "found neither. Check the name." in refused(ConfigError, "someone/nothing", drafter=DRAFTER)


def test_a_gated_repository_needs_a_token_with_access(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "meta-llama/Llama-3.1-8B-Instruct"
    message = refused(CheckpointError, name, drafter=None)
    assert f"target {name}: expected access, found a gated repository, and no token. Ask for access at" in message
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    assert "found a gated repository, and a token without access." in refused(CheckpointError, name, drafter=None)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert (find(name, drafter=None).paths["target"] / "config.json").is_file()


def test_offline_the_cache_is_enough_and_what_is_missing_is_named(
    hub: Hub, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find(needs_tensors=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    shard = sorted(path.name for path in (checkpoints / "target").glob("*.safetensors"))[0]
    message = refused(CheckpointError)
    assert f"expected files in the cache {constants.HF_HUB_CACHE}, found {shard}, " in message
    assert "not there; HF_HUB_OFFLINE is set. Unset HF_HUB_OFFLINE" in message
    assert "found no files of this revision there" in refused(CheckpointError, "someone/tuned", drafter=DRAFTER)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    complete = find()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find() == complete


def test_without_a_connection_the_cache_is_enough(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = find()
    hub.endpoint = "http://127.0.0.1:9"  # discard: nobody listens
    point_at(hub, Path(constants.HF_HUB_CACHE), monkeypatch)
    assert find() == complete
    message = refused(CheckpointError, "someone/tuned", drafter=DRAFTER)
    assert "Check the connection and HF_ENDPOINT, or pass a local directory." in message


def test_a_repository_of_another_kind_is_refused_by_name(hub: Hub, checkpoints: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(checkpoints / "drafter", tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    hub.add("someone/pickled", broken)
    message = refused(CheckpointError, drafter="someone/pickled")
    assert "drafter someone/pickled: expected model.safetensors, found none there." in message
    (broken / "config.json").unlink()
    hub.add("someone/adapter", shutil.copytree(broken, tmp_path / "adapter"))
    assert "expected a config.json, found none there" in refused(CheckpointError, drafter="someone/adapter")


def test_the_variables_of_huggingface_hub_are_heeded(hub: Hub, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME and HF_TOKEN in a process of its own."""
    name = "meta-llama/Llama-3.1-8B-Instruct"
    words = ["-m", "dflash_trt.cli.main", "build", "--target", name, "--drafter", "none", "-o", "engine"]
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": hub.token}
    environment = os.environ | variables | {"PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    path = EngineDir.open(tmp_path / "engine").provenance()["checkpoints"]["target"]
    assert path.startswith(f"{tmp_path}/home/hub/models--meta-llama--Llama-3.1-8B-Instruct/snapshots/")
    assert hub.token not in ran.stdout + ran.stderr


def test_a_yaml_file_takes_names_and_flags_replace_them(hub: Hub, tmp_path: Path, invoke: Invoke) -> None:  # noqa: F811
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "pair.yaml").write_text(f"target: {TARGET}\ndrafter: {DRAFTER}\ndtype: float32\n")
    words = ["build", "configs/pair.yaml", "--drafter", f"{DRAFTER}@tagged"]
    built = invoke(*words, "-o", "engine")
    assert built.exit_code == 0, built.stderr
    hub_sources = EngineDir.open(tmp_path / "engine").provenance()["hub"]
    assert {role: source["name"] for role, source in hub_sources.items()} == {
        "target": TARGET,
        "drafter": f"{DRAFTER}@tagged",
    }
    alone = invoke("build", "configs/pair.yaml", "--drafter", "none", "-o", "alone")
    assert alone.exit_code == 0, alone.stderr
    assert EngineDir.open(tmp_path / "alone").manifest.draft is None


def test_an_engine_from_before_names_had_no_sources(hub: Hub, tmp_path: Path, invoke: Invoke) -> None:  # noqa: F811
    assert invoke("build", "--target", TARGET, "-o", "engine", "--dtype", "float32").exit_code == 0
    fields = read_json(tmp_path / "engine/provenance.json")
    del fields["hub"]
    write_json(tmp_path / "engine/provenance.json", fields)
    assert EngineDir.open(tmp_path / "engine").provenance()["hub"] == {}
