"""An engine directory of backend tensorrt: written, inspected, and refused when it is not for this machine."""

import hashlib
import json
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from dflash_trt.backends.tensorrt import build_rank, compatibility
from dflash_trt.backends.tensorrt.builder import BuiltPlan, PlanOptions
from dflash_trt.backends.tensorrt.compatibility import check_identity, spec_of
from dflash_trt.backends.tensorrt.network import step_inputs_of
from dflash_trt.backends.tensorrt.profiles import AxisRange, Profile
from dflash_trt.cli.main import cli
from dflash_trt.core.errors import ConfigError, EngineDirError
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.opening import open_executor
from tests.engine_dir.building import build
from tests.engines import PAGE_SIZE
from tests.factories import edit_json, make_target
from tests.trt.fake_engine import USER_MANAGED, FakeEngine
from tests.trt.networks import define_pair
from tests.trt.test_step_tokens import make_pair
from tests.trt.test_trt_executor import CPU, HOST_STREAM, RecordedGraphs

PLAN = b"what TensorRT would have serialized"
LIBRARY = b"plugins"
BUILT = BuiltPlan(
    tensorrt_version="1.7.1",
    flags=(),
    profiles=(Profile(name="decode", axes={"T": AxisRange(min=1, opt=16, max=16)}),),
    inputs=(),
    outputs=(),
    num_layers=1,
    layer_counts={},
    plan_bytes=len(PLAN),
    build_time_s=1.0,
    peak_memory_bytes=1,
    warnings=(),
)


@pytest.fixture
def written_plan(monkeypatch, tmp_path):
    """A build command that writes another plan and another library than TensorRT's. What it saw."""
    seen = []

    def build_plan(spec, limits, tensors, *, sink, options, progress, **others):
        [weights] = (path.name for path in tmp_path.rglob("rank*.safetensors"))
        seen.append((weights, tensors["target.embedding"].shape))
        progress("Building engine", 1, 1)
        sink.write(PLAN[:10])
        sink.write(PLAN[10:])
        return BUILT

    library = tmp_path / "build" / "libbuilt.so"
    library.parent.mkdir()
    library.write_bytes(LIBRARY)
    monkeypatch.setattr(build_rank, "build_plan", build_plan)
    monkeypatch.setattr(
        build_rank, "plan_options", lambda config, base_dir: PlanOptions(plugin_library=library, flavor="tensorrt_rtx")
    )
    return seen


def build_directory(root, *options, **pair):
    target, drafter = make_pair(root, **pair)
    words = ("--target", target, "--drafter", drafter, "--backend", "tensorrt", "-o", root / "engine", *options)
    result = run_cli("build", "--max-seq-len", 64, *words)
    assert result.exit_code == 0, result.output
    return root / "engine"


@pytest.fixture
def engine_path(tmp_path, written_plan):
    path = build_directory(tmp_path, "--dtype", "float16")
    assert written_plan == [("rank0.safetensors", (12, 64))]
    return path


def run_cli(*arguments):
    return CliRunner().invoke(cli, list(map(str, arguments)))


def test_the_plan_holds_the_weights_and_config_json_describes_it(engine_path):
    assert (engine_path / "rank0.engine").read_bytes() == PLAN
    assert not list(engine_path.glob("*.safetensors"))
    engine = EngineDir.open(engine_path)
    assert engine.manifest.backend == "tensorrt"
    assert engine.manifest.tensorrt.profiles[0].axes == {"T": (1, 16, 16)}
    spec = spec_of(engine)
    assert (spec.dtype, spec.max_draft_len, spec.page_size) == ("float16", 3, 32)


def edit_record(path, **changes):
    fields = json.loads((path / "config.json").read_text())
    fields["tensorrt"] = {key: value for key, value in (fields["tensorrt"] | changes).items() if value is not None}
    (path / "config.json").write_text(json.dumps(fields))
    sha256 = hashlib.sha256((path / "config.json").read_bytes()).hexdigest()
    edit_json(path / "provenance.json", config_sha256=sha256)


def test_config_json_names_the_page_groups_and_one_without_them_has_one_group(tmp_path, written_plan):
    """Of the models' windows; engines of before page groups have one page table, whatever their windows are."""
    path = build_directory(tmp_path, gemma="gemma3_text", sliding_window=9, layer_types=["sliding_attention"] * 2)
    pages = [shown_pages(path)]
    names = {tensor.name for tensor in step_inputs_of(spec_of(EngineDir.open(path)))}
    assert {"page_table", "page_table.6", "page_table.9"} <= names
    edit_record(path, page_windows=None)
    engine = EngineDir.open(path)
    assert (engine.manifest.tensorrt.page_windows, engine.manifest.has_page_groups) == ((), False)
    assert spec_of(engine).page_windows == ()
    pages.append(shown_pages(path))
    assert ["of layers with a window of 6 tokens" in words for words in pages] == [True, False]
    edit_record(path, page_windows=[6])
    with pytest.raises(
        EngineDirError, match=r"expected page_windows \[6, 9\] in 'tensorrt', as in the models, or none"
    ):
        EngineDir.open(path)


def shown_pages(path):
    return " ".join(run_cli("inspect", path).output.split())


GPU = {"is_available": lambda: True, "get_device_capability": lambda: (0, 0), "get_device_name": lambda: "a GPU"}


@pytest.fixture
def here(monkeypatch):
    """A machine with the GPU and the TensorRT that the directory was built with."""
    for name, answer in GPU.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(compatibility, "load_tensorrt", lambda flavor, error: SimpleNamespace(__version__="1.7.1"))


def test_a_directory_is_whole_wherever_it_stands(engine_path, tmp_path, here):
    (tmp_path / "build" / "libbuilt.so").unlink()
    moved = tmp_path / "another" / "place"
    moved.parent.mkdir()
    engine_path.rename(moved)
    library = check_identity(EngineDir.open(moved))
    assert library == moved / "libdflash_trt_plugins.so"
    assert library.read_bytes() == LIBRARY


def test_the_library_of_the_directory_must_be_the_one_that_was_copied(engine_path, monkeypatch):
    monkeypatch.setattr("dflash_trt.engine_dir.opening.MAX_ALWAYS_HASHED_BYTES", 0)
    (engine_path / "libdflash_trt_plugins.so").write_bytes(LIBRARY[::-1])
    with pytest.raises(EngineDirError, match=r"libdflash_trt_plugins.so: expected sha256"):
        EngineDir.open(engine_path)


def test_a_library_named_by_the_user_is_loaded_instead(engine_path, tmp_path, here, monkeypatch):
    """It may be another file than the directory's; the plugins in it are checked when it is loaded."""
    other = tmp_path / "other.so"
    with pytest.raises(EngineDirError, match=r"plugin library .*other.so: expected a file, found none"):
        check_identity(EngineDir.open(engine_path), plugin_library=other)
    other.write_bytes(b"rebuilt")
    asked = []

    def deserialize(plan, *, plugin_library):
        asked.append((plan, plugin_library))
        raise EngineDirError("as far as this")

    monkeypatch.setattr("dflash_trt.backends.tensorrt.executor.deserialize", deserialize)
    for given, expected in ((None, engine_path / "libdflash_trt_plugins.so"), (other, other)):
        with pytest.raises(EngineDirError, match="as far as this"):
            open_executor(EngineDir.open(engine_path), RuntimeConfig(plugin_library=given))
        assert asked.pop() == (engine_path / "rank0.engine", expected)


def test_a_plugin_library_for_an_engine_without_plugins_is_refused(tmp_path):
    build(make_target(tmp_path / "target").parent, tmp_path / "engine")
    with pytest.raises(ConfigError, match="plugin_library: expected an engine with TensorRT plugins, found one of ba"):
        open_executor(EngineDir.open(tmp_path / "engine"), RuntimeConfig(plugin_library="p.so"))


def test_inspect_prints_gpu_versions_profiles_and_the_sizes_of_weights(engine_path):
    report = json.loads(run_cli("inspect", engine_path, "--json").stdout)
    assert report["tensorrt"]["tensorrt_version"] == "1.7.1"
    assert report["target"]["weights_bytes_by_format"] == {"float16": 2 * report["target"]["num_parameters"]}
    shown = run_cli("inspect", engine_path).output
    assert "libdflash_trt_plugins.so" in shown
    assert "1 .. 16 .. 16" in shown


def _change(plan):
    plan.write_bytes(PLAN.replace(b"TensorRT", b"TensorRX"))


def _cut(plan):
    plan.write_bytes(PLAN[:-1])


def _delete(plan):
    plan.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_change, "rank0.engine: expected sha256"),
        (_cut, "rank0.engine: expected 35 bytes, found 34"),
        (_delete, "rank0.engine: expected a file"),
    ],
)
def test_a_changed_plan_is_refused_by_name(engine_path, damage, message):
    damage(engine_path / "rank0.engine")
    with pytest.raises(EngineDirError, match=message):
        EngineDir.open(engine_path)


@pytest.mark.parametrize("name", ["rank0.engine", "libdflash_trt_plugins.so"])
def test_a_file_that_the_manifest_does_not_list_is_missed(engine_path, name):
    fields = json.loads((engine_path / "config.json").read_text())
    del fields["files"][name]
    (engine_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(EngineDirError, match=rf"key 'files' does not list '{name}'"):
        EngineDir.open(engine_path)


def test_a_backend_without_its_record_is_refused(engine_path):
    fields = json.loads((engine_path / "config.json").read_text())
    fields["tensorrt"] = None
    (engine_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(EngineDirError, match="'tensorrt' record for backend tensorrt"):
        EngineDir.open(engine_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_running_it_without_a_gpu_says_what_is_missing(engine_path):
    with pytest.raises(EngineDirError, match="expected an NVIDIA GPU with a driver"):
        open_executor(EngineDir.open(engine_path), RuntimeConfig())


def test_float16_needs_the_tensorrt_backend(tmp_path):
    result = run_cli("build", "--target", tmp_path, "--dtype", "float16", "-o", tmp_path / "engine")
    assert result.exit_code == 2
    assert "dtype float16 needs backend tensorrt" in result.output


def test_opening_makes_contexts_then_plans_pages_then_captures_and_looks_at_the_pages(
    trt, tmp_path, written_plan, here, monkeypatch
):
    sizes = ("--page-size", PAGE_SIZE, "--max-batch-size", 4, "--max-num-tokens", 64, "--dtype", "float32")
    path = build_directory(tmp_path, *sizes)
    pair = tmp_path / "target", tmp_path / "drafter"
    defined = define_pair(trt, *pair)
    limits = EngineDir.open(path).manifest.build_config
    engine, contexts_when_planned, checked = FakeEngine(defined, limits), [], []
    graphs = RecordedGraphs(engine)

    def free_memory():
        contexts_when_planned.append(len(engine.contexts))
        return 1 << 22, 1 << 30

    opened = "dflash_trt.backends.tensorrt.executor"
    monkeypatch.setattr(torch.cuda, "mem_get_info", free_memory)
    monkeypatch.setattr(f"{opened}.deserialize", lambda *arguments, **options: (engine, ()))
    monkeypatch.setattr(f"{opened}._gpu", lambda: (CPU, HOST_STREAM))
    monkeypatch.setattr(f"{opened}.CudaCapture", lambda stream: graphs)
    strategies = SimpleNamespace(USER_MANAGED=USER_MANAGED)
    module = SimpleNamespace(ExecutionContextAllocationStrategy=strategies)
    monkeypatch.setattr("dflash_trt.backends.tensorrt.module.load_tensorrt", lambda flavor: module)
    monkeypatch.setattr("dflash_trt.backends.tensorrt.canary.check_pages", checked.append)
    executor = open_executor(EngineDir.open(path), RuntimeConfig())
    num_graphs = 2 * len([1, 2, 4])  # of K = 3, and of K = 1 for steps without drafts
    assert contexts_when_planned == [num_graphs + 2] == [len(engine.contexts)]
    assert executor.graphs.num_graphs == num_graphs
    assert checked == [executor]
    assert executor.page_plan.num_pages == executor.limits.num_pages > 0
