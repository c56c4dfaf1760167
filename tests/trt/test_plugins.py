"""Plugin nodes: only names that TensorRT 11.4 has, and only what plugins/README.md promises."""

import re
from pathlib import Path

import pytest

from dflash_trt.core.errors import BuildError
from dflash_trt.kernels.programs import PROGRAMS
from tests.engines import PAGE_SIZE
from tests.trt.networks import define_pair
from tests.trt.recorder import CheckedNetwork, FakePlugins, UnknownApiError, check_call, checked_module
from tests.trt.test_step_tokens import FP8_PAGES, PAIRS, make_pair

README = (Path(__file__).parents[2] / "plugins" / "README.md").read_text()


def test_every_node_has_its_layers_scales(trt, tmp_path):
    nodes = define_pair(trt, *make_pair(tmp_path), pages=FP8_PAGES).nodes
    scales = [(node.fields["k_scale"], node.fields["v_scale"]) for node in nodes if "k_scale" in node.fields]
    expected = [(layer.k, layer.v) for layer in (*FP8_PAGES.target_kv, *FP8_PAGES.draft_kv)]
    assert scales == [pytest.approx(pair) for pair in expected]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_network_uses_only_what_tensorrt_has(trt, tmp_path, name, dtype):
    target, drafter = make_pair(tmp_path, **PAIRS[name])
    nodes = define_pair(trt, target, drafter, dtype=dtype).nodes
    num_draft_layers = 0 if drafter is None else PAIRS[name].get("num_layers", 2)
    counts = [sum(node.name == plugin.name for node in nodes) for plugin in PROGRAMS]
    # No chains, no experts, no delta nets, no latents, no collectives, nothing of deterministic engines.
    expected = [4, num_draft_layers, 0, 0, 1, 1, int(num_draft_layers > 0)]
    assert counts == expected + [0] * (len(PROGRAMS) - len(expected))


def test_an_engine_that_never_drafts_only_writes_the_draft_context(trt, tmp_path):
    target, drafter = make_pair(tmp_path)
    nodes = define_pair(trt, target, drafter, max_draft_len=0).nodes
    assert [node.name for node in nodes if "Draft" in node.name] == ["WriteDraftContext"] * 2
    fields = {"page_type": 0, "page_size": PAGE_SIZE, "k_scale": 1.0, "v_scale": 1.0}
    writers = [node.fields for node in nodes if node.name == "WriteDraftContext"]
    assert writers == [fields | {"state": 4 + layer} for layer in range(2)]


def test_a_plugin_that_no_library_has_is_named(trt, tmp_path):
    target, drafter = make_pair(tmp_path)
    with pytest.raises(BuildError, match="expected dflash_trt::AttendDraft version 3, found no loaded library"):
        define_pair(trt, target, drafter, missing=("AttendDraft",))


@pytest.mark.parametrize("plugin", PROGRAMS, ids=lambda plugin: plugin.name)
def test_the_readme_lists_every_field_and_tensor_with_its_type_and_shape(plugin):
    section = README.split(f"## `{plugin.name}`")[1].split("\n## ")[0]
    for field in plugin.fields:
        assert f"`{field.name}`" in section
    rows = re.findall(r"^\| \d+ \| (\w+) \| (.*) \|$", section, flags=re.MULTILINE)
    if not rows:
        assert [section.index(name) for name in plugin.input_names] == sorted(map(section.index, plugin.input_names))
        return
    for rule, (name, text) in zip((*plugin.inputs, *plugin.outputs), rows, strict=True):
        written = re.sub(r"\w+_bytes\([^)]*\)", "bytes", rule.text)  # said below the table
        assert rule.name == name and re.match(re.escape(written) + "(?![^:;,])", text), (text, written)


@pytest.mark.parametrize(
    "use",
    [
        lambda trt, network: trt.LayerNormalization,
        lambda trt, network: trt.ElementWiseOperation.XOR_BITS,
        lambda trt, network: network.add_rms_norm,
        lambda trt, network: network.add_cast(network.get_input(0)),
        lambda trt, network: network.get_input(0).to_numpy,
    ],
)
def test_the_recorder_refuses_what_the_manifest_does_not_know(trt, use):
    plugins = FakePlugins(trt)
    network = trt.Builder(trt.Logger()).create_network(0)
    network.add_input("x", trt.float32, (1,))
    with pytest.raises(UnknownApiError):
        use(checked_module(trt, plugins), CheckedNetwork(network, plugins))


def test_signatures_are_read_with_their_defaults():
    signature = "add_fill(self: N, shape: Dims, op: Op, output_type: DataType = <DataType.FLOAT: 0>) -> IFillLayer"
    check_call(signature, 2, {})
    check_call(signature, 2, {"output_type": 1})
    for num_arguments, options in ((1, {}), (4, {}), (2, {"dtype": 1})):
        with pytest.raises(UnknownApiError):
            check_call(signature, num_arguments, options)
