"""The model repository: what is written, what a check finds, and the text form of protocol buffers."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.core.errors import ConfigError
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.servers.triton import repository
from dflash_trt.servers.triton.environment import (
    check_gpus_of_ranks,
    check_numpy,
    explained,
    gpus_of_instance,
    select_gpus,
)
from dflash_trt.servers.triton.pbtxt import Message, Word, read, write
from dflash_trt.servers.triton.repository import Deployment, check_model, config_text, write_model
from dflash_trt.servers.triton.settings import ModelSettings
from dflash_trt.servers.triton.tensors import INPUTS, OUTPUTS, documentation_tables
from tests.cli.conftest import Invoke, invoke  # noqa: F401 - a fixture
from tests.engine_dir.building import build
from tests.factories import make_target
from tests.triton_server.conftest import ROOT


def deployment(engine_dir: Path, **options: Any) -> Deployment:
    settings = ModelSettings(engine_dir=str(engine_dir), **options.pop("settings", {}))
    return Deployment(model_name=options.pop("model_name", "dflash"), settings=settings, **options)


def contents(path: Path) -> dict[str, tuple[bytes, int]]:
    files = (file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def test_writing_again_changes_nothing_and_other_options_do(engine_dir, tmp_path) -> None:
    for copies_engine in (False, True):
        model = write_model(tmp_path, deployment(engine_dir, copies_engine=copies_engine))
        before = contents(model)
        write_model(tmp_path, deployment(engine_dir, copies_engine=copies_engine))
        assert contents(model) == before
    assert check_model(model).engine_dir == "engine"
    write_model(
        tmp_path, deployment(engine_dir, copies_engine=True, settings={"runtime": RuntimeConfig(max_queue_len=3)})
    )
    assert contents(model) != before
    assert check_model(model).runtime.max_queue_len == 3


def test_a_foreign_model_is_not_touched(engine_dir, tmp_path) -> None:
    (tmp_path / "dflash").mkdir()
    (tmp_path / "dflash" / "config.pbtxt").write_text('backend: "onnxruntime"\n')
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="something else"):
        write_model(tmp_path, deployment(engine_dir))
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("decoupled: true", "decoupled: false", "decoupled: expected True, found False"),
        ('backend: "python"', 'backend: "pythom"', "backend: expected python, found pythom"),
        (
            'name: "max_tokens"',
            'name: "max_tokenz"',
            "input 'max_tokens': expected TYPE_INT32 [1] optional, found none",
        ),
        ("max_batch_size: 0", "max_batch_size: 8", "max_batch_size: expected 0 or 1, found 8"),
        ('key: "max_queue_len"', 'key: "max_queu_len"', "Did you mean 'max_queue_len'?"),
        ('string_value: "3"', 'string_value: "three"', "'max_queue_len': expected an integer, found 'three'"),
        ('name: "dflash"', 'name: "other"', "config.pbtxt name: expected dflash, found other"),
        ('name: "text_output"', 'name: "text_outpud"', "output 'text_output': expected TYPE_STRING [1], found none"),
        ("dims: [-1]", "dims: [1]", "input 'input_ids': expected TYPE_INT32 [-1] optional, found TYPE_INT32 [1]"),
        ("input {", 'input {\n  name: "extra"\n}\ninput {', "input 'extra': expected none"),
        ("max_batch_size: 0", "max_batch_size 0", "line 4: expected ':' or '{', found 0"),
    ],
)
def test_a_check_finds_what_was_changed(engine_dir, tmp_path, old, new, said) -> None:
    model = write_model(tmp_path, deployment(engine_dir, settings={"runtime": RuntimeConfig(max_queue_len=3)}))
    check_model(model)
    config = model / "config.pbtxt"
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as found:
        check_model(model)
    assert said in str(found.value)


def test_a_check_finds_missing_files_and_engines(engine_dir, tmp_path) -> None:
    model = write_model(tmp_path, deployment(engine_dir, copies_engine=True))
    (model / "1" / "model.py").write_text("print()")
    shutil.rmtree(model / "1" / "engine")
    with pytest.raises(ConfigError, match="2 problems") as found:
        check_model(model)
    assert "the model of this version" in str(found.value)


def test_a_copied_engine_that_is_cut_or_another_is_replaced(engine_dir, tmp_path) -> None:
    copy = write_model(tmp_path, deployment(engine_dir, copies_engine=True)) / "1" / "engine"
    sound = {name: content for name, (content, _) in contents(copy).items()}
    (copy / "config.json").unlink()
    write_model(tmp_path, deployment(engine_dir, copies_engine=True))
    assert {name: content for name, (content, _) in contents(copy).items()} == sound
    target = make_target(tmp_path / "target")
    other = build(tmp_path, tmp_path / "other", target=str(target))
    write_model(tmp_path, deployment(other.path, copies_engine=True))
    assert EngineDir.open(copy).manifest == other.manifest


def test_a_check_looks_at_the_environment_and_at_the_engine_that_is_named(
    engine_dir,
    tmp_path,
    invoke,  # noqa: F811
    monkeypatch,
) -> None:
    monkeypatch.setattr(repository, "_ENVIRONMENT_PROBE", 'print(\'["2.4.6", "0.1"]\')')
    words = ["deploy", "triton", engine_dir, "-o", tmp_path, "--environment", sys.prefix]
    assert "expected version 1" in invoke(*words).stderr
    ran = invoke(*words, "--accept-numpy-2")
    assert "activated by the server" in ran.stdout
    check = ["deploy", "triton", "-o", tmp_path, "--check"]
    assert invoke(*check).exit_code == 0
    assert f"{tmp_path / 'dflash'}: expected engine" in invoke(*check, tmp_path).stderr
    monkeypatch.setattr(repository, "_ENVIRONMENT_PROBE", "import nothing_of_this_name")
    assert "expected dflash-trt and numpy in it, found ModuleNotFoundError" in invoke(*check).stderr
    assert invoke("deploy", "triton", engine_dir, "-o", tmp_path, "--model-name", "sound").exit_code == 0
    assert invoke(*check, "--model-name", "sound").exit_code == 0, "the broken one beside it is not looked at"


def test_the_command_writes_and_checks(engine_dir, tmp_path, invoke) -> None:  # noqa: F811
    models = tmp_path / "models"
    ran = invoke("deploy", "triton", engine_dir, "-o", models, "--model-name", "ensemble", "--adaptive", "--ngram")
    assert (ran.exit_code, "tritonserver --model-repository=" in ran.stdout) == (0, True)
    for named in (engine_dir, os.path.relpath(engine_dir)):
        ran = invoke("deploy", "triton", named, "-o", models, "--check")
        assert (ran.exit_code, "model ensemble" in ran.stdout) == (0, True)
    runtime = check_model(models / "ensemble").runtime
    assert (runtime.adaptive_draft_length, runtime.ngram) == (True, True)
    words = ["--model-name", "scheduled", "--draft-length", "1:3,4:2"]
    assert invoke("deploy", "triton", engine_dir, "-o", models, *words).exit_code == 0
    assert check_model(models / "scheduled").runtime.draft_length == {1: 3, 4: 2}
    for words, said in (
        (["-o", models], "expected an ENGINE_DIR"),
        ([engine_dir, "-o", models, "--draft-length", "x"], "--draft-length: expected K of 0 to"),
        (["-o", tmp_path / "empty", "--check"], "expected a model of dflash-trt"),
        ([engine_dir, "-o", models, "--gpus", "a"], "expected indices"),
        ([engine_dir, "-o", models, "--gpus", "0,0"], "expected distinct indices"),
        ([engine_dir, "-o", models, "--gpus=-1"], "expected distinct indices"),
        ([engine_dir, "-o", models, "--gpus", "0", "--instances", "2"], "instances: expected 1 or more on a CPU"),
        ([engine_dir, "-o", models, "--instances", "0"], "instances: expected 1 or more on a CPU"),
        ([engine_dir, "-o", models, "--model-name", "a/b"], "model name: expected a file name"),
        ([engine_dir, "-o", models, "--no-drafter", "--adaptive"], "--no-drafter and --adaptive are mutually"),
        ([engine_dir, "-o", models, "--ngram", "--overlap"], "--ngram and --overlap are mutually exclusive"),
        (
            [engine_dir, "-o", models, "--no-drafter", "--draft-length", "0"],
            "--no-drafter and --draft-length are mutually",
        ),
        ([engine_dir, "-o", models, "--system", "x"], "Deploy with --chat"),
        ([engine_dir, "-o", models, "--system", ""], "Deploy with --chat"),
        ([engine_dir, "-o", models, "--environment", tmp_path], "expected a virtual environment"),
        ([engine_dir, "-o", tmp_path / "the models"], "model repository: expected a path without spaces"),
        ([engine_dir, "-o", models, "--model-name", "$(id)"], "model repository: expected a path without spaces"),
        ([engine_dir, "-o", models, "--environment", "$HOME"], "environment: expected a path without spaces"),
        ([tmp_path, "-o", models], "dflash-trt build"),
    ):
        ran = invoke("deploy", "triton", *words)
        assert ran.exit_code in (1, 2), words
        assert said in ran.stderr, words


def test_settings_survive_as_parameters() -> None:
    settings = ModelSettings(
        engine_dir="/e",
        runtime=RuntimeConfig(draft_length=0, kv_cache_free_memory_fraction=0.25),
        wraps_in_chat=True,
        system='Say "é\n".',
        accepted_request_parameters=("a", "b"),
    )
    assert ModelSettings.from_parameters(settings.parameters()) == settings
    assert set(ModelSettings(engine_dir="/e").parameters()) == {"engine_dir"}
    of_triton = dict.fromkeys(("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "INFERENCE_TIMEOUT_SECONDS"), "x")
    assert ModelSettings.from_parameters({"engine_dir": "/e"} | of_triton) == ModelSettings(engine_dir="/e")


def test_a_model_has_all_its_ranks_on_the_servers_machine() -> None:
    with pytest.raises(ConfigError, match="parameter 'nnodes': expected a known one"):
        ModelSettings.from_parameters({"engine_dir": "/e", "nnodes": "2"})


def test_settings_out_of_range_are_refused_all_at_once() -> None:
    wrong = {"max_queue_len": "0", "num_threads": "0", "draft_length": "-1", "default_max_tokens": "0"}
    with pytest.raises(ConfigError) as refusal:
        ModelSettings.from_parameters({"engine_dir": "/e", "drain_timeout_s": "-1"} | wrong)
    for name in (*wrong, "drain_timeout_s"):
        assert name in str(refusal.value)
    with pytest.raises(ConfigError, match="2 problems"):
        ModelSettings(engine_dir="/e", drain_timeout_s=-1.0, default_max_tokens=0)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("use_drafter", "yes", "expected true or false, found 'yes'"),
        ("draft_length", "1:3,2", "draft_length: expected K of 0 to 2147483647, or pairs REQUESTS:K such as 1:7,16:5"),
        ("drain_timeout_s", "soon", "expected a number, found 'soon'"),
        ("drain_timeout_s", "nan", "drain_timeout_s: expected 0 or more, found nan"),
        ("accepted_request_parameters", "a", "expected a JSON list of strings, found 'a'"),
        ("accepted_request_parameters", "[1]", "expected a JSON list of strings, found '[1]'"),
    ],
)
def test_a_parameter_of_another_type_is_refused_by_its_name(name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        ModelSettings.from_parameters({"engine_dir": "/e", name: text})
    assert name in str(refusal.value) and said in str(refusal.value)


def test_paths_of_a_config_are_absolute_or_of_the_version_directory(tmp_path, monkeypatch) -> None:
    for engine_dir, found in (("engine", "/models/a/1/engine"), ("/e", "/e")):
        assert str(ModelSettings(engine_dir=engine_dir).engine_path(Path("/models/a/1"))) == found
    monkeypatch.chdir(tmp_path)
    assert f'"{tmp_path}/environment"' in config_text(deployment(tmp_path, environment=Path("environment")))


def test_the_config_is_what_triton_reads(engine_dir, tritonclient) -> None:
    """Read by Triton's own schema, with Google's own parser."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    text = config_text(deployment(engine_dir, gpus=(0, 3), settings={"wraps_in_chat": True, "system": 'Say "é"\\\n'}))
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert [tensor.name for tensor in config.input] == [tensor.name for tensor in INPUTS]
    assert [list(tensor.dims) for tensor in config.output] == [list(tensor.dims) for tensor in OUTPUTS]
    assert all(tensor.optional for tensor in config.input)
    assert config.model_transaction_policy.decoupled
    assert list(config.instance_group[0].gpus) == [0, 3]
    assert config.parameters["system"].string_value == 'Say "é"\\\n'
    # And the other way: what Google's printer writes, our reader takes.
    again = read(text_format.MessageToString(config), subject="printed")
    assert [entry.one("name") for entry in again.all("input")] == [tensor.name for tensor in INPUTS]


_SCALARS = st.one_of(st.booleans(), st.integers(), st.text(), st.sampled_from([Word("TYPE_BOOL"), Word("KIND_GPU")]))
_NAMES = st.from_regex(r"[a-z_][a-z_0-9]{0,8}", fullmatch=True).filter(lambda name: name not in ("true", "false"))
_MESSAGES = st.recursive(
    st.builds(Message, st.lists(st.tuples(_NAMES, st.one_of(_SCALARS, st.lists(st.integers()))), max_size=4)),
    lambda inner: st.builds(Message, st.lists(st.tuples(_NAMES, inner), max_size=3)),
    max_leaves=6,
)


@given(_MESSAGES)
def test_what_is_written_is_read(message: Message) -> None:
    assert read(write(message), subject="test") == message


@pytest.mark.parametrize(
    ("version", "accepts", "is_refused"), [("1.26.4", False, False), ("2.4.6", False, True), ("2.4.6", True, False)]
)
def test_numpy_2_is_refused_by_its_version(version, accepts, is_refused) -> None:
    if not is_refused:
        check_numpy(version, accepts_numpy_2=accepts)
        return
    with pytest.raises(ConfigError, match=r"expected version 1, .*, found 2\.4\.6\. Install 'numpy<2'"):
        check_numpy(version, accepts_numpy_2=accepts)


def test_another_libpython_explains_a_failed_import(tmp_path) -> None:
    (tmp_path / "pyvenv.cfg").write_text("home = /usr\nversion = 3.11.7\n")
    error = ImportError("undefined symbol: x")
    assert explained(error, str(tmp_path), "3.11.7") is error
    said = str(explained(error, str(tmp_path), "3.11.2"))
    assert "expected Python 3.11.7" in said
    assert "found 3.11.2, and undefined symbol: x" in said


def test_an_instance_sees_its_gpus_alone() -> None:
    for inherited, gpus, expected in (
        (None, [2], "2"),
        ("4,5", [1], "5"),
        ("GPU-a, GPU-b", [1], "GPU-b"),
        (None, [2, 0], "2,0"),
        ("4,5,6", [2, 1], "6,5"),
    ):
        environment = {} if inherited is None else {"CUDA_VISIBLE_DEVICES": inherited}
        select_gpus(gpus, environment)
        assert environment["CUDA_VISIBLE_DEVICES"] == expected
    untouched: dict[str, str] = {}
    select_gpus([], untouched)
    assert not untouched
    for gpus in ([1], [0, 1]):
        with pytest.raises(ConfigError, match="expected GPUs 0 to 0"):
            select_gpus(gpus, {"CUDA_VISIBLE_DEVICES": "4"})


def test_the_gpus_of_an_instance_are_those_that_triton_or_the_deployment_says() -> None:
    def gpus(kind: str, name: str = "dflash_0_0") -> tuple[int, ...]:
        arguments = {"model_instance_kind": kind, "model_instance_name": name, "model_instance_device_id": "5"}
        return gpus_of_instance(arguments, instance_gpus)

    instance_gpus = ModelSettings(engine_dir="/e", gpu_device_ids="0,1;2,3").instance_gpus
    assert (gpus("CPU"), gpus("GPU"), gpus("MODEL"), gpus("MODEL", "dflash_0_1")) == ((), (5,), (0, 1), (2, 3))
    with pytest.raises(ConfigError, match="expected count 2"):
        gpus("MODEL", "dflash_0_2")
    instance_gpus = ()
    assert gpus("MODEL") == (), "a config of another hand: all that the server sees"


def test_an_instance_has_a_gpu_for_each_rank_or_runs_on_the_cpu() -> None:
    for gpus in ((), (3, 1)):
        check_gpus_of_ranks(gpus, 2)
    for gpus in ((3,), (0, 1, 2)):
        with pytest.raises(ConfigError, match=f"expected 2 for each instance.*found {len(gpus)}"):
            check_gpus_of_ranks(gpus, 2)


def test_the_documentation_lists_the_tensors_of_the_model() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    for table in documentation_tables():
        assert table in page, "replace the table in docs/deployment.md by documentation_tables()"


@pytest.fixture(scope="module")
def engine_of_two(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("two_ranks")
    return build(path, path / "engine", target=str(make_target(path / "target")), tp_size=2).path


@pytest.mark.parametrize(
    ("options", "group", "gpu_device_ids"),
    [
        ({}, [("count", 1), ("kind", "KIND_CPU")], None),
        ({"gpus": (2, 3)}, [("count", 1), ("kind", "KIND_MODEL")], "2,3"),
        ({"gpus": (0, 1, 3, 2)}, [("count", 2), ("kind", "KIND_MODEL")], "0,1;3,2"),
    ],
)
def test_the_ranks_of_an_engine_are_one_instance(engine_of_two, tmp_path, options, group, gpu_device_ids) -> None:
    model = write_model(tmp_path, deployment(engine_of_two, **options))
    config = read((model / "config.pbtxt").read_text(), subject="test")
    found = config.one("instance_group")
    assert isinstance(found, Message) and found.fields == group
    assert check_model(model).gpu_device_ids == gpu_device_ids


def test_gpus_that_do_not_divide_among_the_ranks_are_refused(engine_of_two, tmp_path) -> None:
    for gpus in ((0,), (0, 1, 2)):
        with pytest.raises(ConfigError, match=r"gpus: expected 2 for each instance, one for each rank of the engine"):
            write_model(tmp_path, deployment(engine_of_two, gpus=gpus))
    model = write_model(tmp_path, deployment(engine_of_two, gpus=(0, 1)))
    config = model / "config.pbtxt"
    text = config.read_text()
    for old, new in (("kind: KIND_MODEL", "kind: KIND_GPU\n  gpus: [0, 1]"), ('"0,1"', '"0"'), ('"0,1"', '"0,1;2"')):
        parameter = 'parameters {\n  key: "gpu_device_ids"\n  value {\n    string_value: "0,1"\n  }\n}\n'
        changed = text.replace(parameter, "") if "GPU" in new else text
        config.write_text(changed.replace(old, new))
        with pytest.raises(ConfigError, match="GPUs of an instance: expected 2 for each instance"):
            check_model(model)
    config.write_text(text.replace('"0,1"', '"0-1"'))
    with pytest.raises(ConfigError, match=r"gpu_device_ids: expected indices of GPUs such as 0,1;2,3, .* found '0-1'"):
        check_model(model)
