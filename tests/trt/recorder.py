"""A TensorRT that knows only the public API of TensorRT 11.4, and counts plugin nodes as layers.

`Checked` stands between the lowering and a real module: every attribute, method and enum that is touched must be in
the manifest of the 11.4 bindings, and every call must fit its signature. Behind it, all layers are added to a real
TensorRT-RTX network. That module has no plugins, so a plugin node becomes a `PluginNode`, whose outputs enter the
real network as inputs of the dtypes and shapes that plugins/README.md promises.
"""

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_trt.kernels.programs import PROGRAMS
from tests.plugins.output_shapes import output_shapes

MANIFEST = json.loads((Path(__file__).parents[1] / "data" / "tensorrt_11.4_api_manifest.json").read_text())


class UnknownApiError(AssertionError):
    """The code uses what TensorRT 11.4 does not have, or not in this way."""


class Checked:
    """Wraps an object of the class `kind`, or the module itself when `kind` is None."""

    def __init__(self, wrapped: Any, kind: str | None) -> None:
        object.__setattr__(self, "_wrapped", wrapped)
        object.__setattr__(self, "_kind", kind)

    def __getattr__(self, name: str) -> Any:
        if self._kind is None:
            return _of_module(self._wrapped, name)
        signature = _member(self._kind, name)
        value = getattr(self._wrapped, name)
        if signature == "property":
            return wrap(value)

        def call(*arguments: Any, **options: Any) -> Any:
            check_call(signature, len(arguments), options)
            return wrap(value(*map(unwrap, arguments), **{key: unwrap(item) for key, item in options.items()}))

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        if _member(self._kind or "", name) != "property":
            raise UnknownApiError(f"{self._kind}.{name} is a method")
        setattr(self._wrapped, name, unwrap(value))


def check_call(signature: str, num_arguments: int, options: dict[str, Any]) -> None:
    """Number and names of arguments against a manifest line such as `add_cast(self: N, input: ITensor) -> L`."""
    if "*args" in signature:
        return  # an overload, which the bindings do not describe
    inside = signature[signature.index("(") + 1 : signature.rindex(")")]
    parameters = re.findall(r"(?:^|, )(\w+): [^,=]+(= )?", re.sub(r"\[[^\]]*\]|<[^>]*>", "", inside))
    names = [(name, bool(default)) for name, default in parameters if name != "self"]
    given = {name for name, _ in names[:num_arguments]} | set(options)
    missing = [name for name, has_default in names if not has_default and name not in given]
    unknown = set(options) - {name for name, _ in names}
    if missing or unknown or num_arguments > len(names):
        raise UnknownApiError(f"{signature}: called with {num_arguments} arguments and {sorted(options)}")


def wrap(value: Any) -> Any:
    """Objects of known classes are checked further; numbers, enums, lists and None pass."""
    kind = type(value).__name__
    return Checked(value, kind) if kind in MANIFEST["classes"] and kind not in ("Dims", "Weights") else value


def unwrap(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(unwrap(item) for item in value)
    return object.__getattribute__(value, "_wrapped") if isinstance(value, Checked) else value


def checked_module(trt: Any, plugins: "FakePlugins | None" = None) -> Any:
    """The module as TensorRT 11.4 would offer it."""
    return Checked(_Module(trt, plugins), None)


@dataclass
class PluginNode:
    """One plugin layer: its creator's name, its fields, and the real tensors around it, which may be renamed."""

    name: str
    fields: dict[str, float]
    given: list[Any] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)

    @property
    def inputs(self) -> list[str]:
        return [tensor.name for tensor in self.given]

    @property
    def outputs(self) -> list[str]:
        return [tensor.name for tensor in self.made]


class FakePlugins:
    """The registry and the nodes."""

    def __init__(self, trt: Any, *, missing: tuple[str, ...] = ()) -> None:
        self.trt = trt
        self.missing = missing
        self.nodes: list[PluginNode] = []

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        assert (version, namespace) == ("3", "dflash_trt")
        return None if name in self.missing else _Creator(name)

    def add(self, network: Any, inputs: list[Any], plugin: PluginNode) -> "_PluginLayer":
        plugin.given = inputs
        for i, (dtype, shape) in enumerate(output_types(self.trt, plugin.name, inputs, plugin.fields)):
            plugin.made.append(network.add_input(f"plugin {len(self.nodes)} output {i}", dtype, shape))
        self.nodes.append(plugin)
        # An input cannot be marked as an output; what follows it can.
        return _PluginLayer([network.add_identity(tensor).get_output(0) for tensor in plugin.made], plugin)


def output_types(trt: Any, name: str, inputs: list[Any], fields: Mapping[str, float]) -> list[tuple[Any, Any]]:
    """What the program promises about the outputs of a node: dtype and shape."""
    program = next(program for program in PROGRAMS if program.name == name)
    types = {"F": inputs[0].dtype, "int32": trt.DataType.INT32, "float32": trt.DataType.FLOAT}
    shapes = {name: tuple(tensor.shape) for name, tensor in zip(program.input_names, inputs, strict=True)}
    dtypes = [types[rule.dtype] for rule in program.outputs]
    return list(zip(dtypes, output_shapes(program, shapes, fields), strict=True))


class CheckedNetwork(Checked):
    """A real RTX network, with add_plugin_v3."""

    def __init__(self, network: Any, plugins: FakePlugins) -> None:
        super().__init__(network, "INetworkDefinition")
        object.__setattr__(self, "_plugins", plugins)

    def add_plugin_v3(self, inputs: Any, shape_inputs: Any, plugin: Any) -> Any:
        check_call(_member("INetworkDefinition", "add_plugin_v3"), 3, {})
        assert shape_inputs == []
        return self._plugins.add(self._wrapped, unwrap(list(inputs)), plugin)


class _PluginLayer:
    def __init__(self, outputs: list[Any], plugin: PluginNode) -> None:
        self._outputs = outputs
        self.plugin = plugin
        self.name = ""

    def get_output(self, index: int) -> Any:
        return wrap(self._outputs[index])


@dataclass
class _Creator:
    name: str

    def create_plugin(self, name: str, field_collection: list[Any], phase: Any) -> PluginNode:
        assert phase == "BUILD"
        formats = {"INT32": "<i", "FLOAT32": "<f"}
        fields = {item.name: struct.unpack(formats[item.type], bytes(item.data))[0] for item in field_collection}
        return PluginNode(name=self.name, fields=fields)


class _Module:
    """TensorRT-RTX, and what TensorRT has beyond it."""

    def __init__(self, trt: Any, plugins: FakePlugins | None) -> None:
        self._trt = trt
        self._plugins = plugins

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trt, name)

    def get_plugin_registry(self) -> Any:
        assert self._plugins is not None
        return self._plugins


@dataclass
class _Field:
    name: str
    data: bytes
    type: Any


def _of_module(module: Any, name: str) -> Any:
    if name in MANIFEST["enums"]:
        return _CheckedEnum(name, getattr(module, name))
    if name == "get_plugin_registry":
        assert name in MANIFEST["functions"]
        return module.get_plugin_registry
    if name == "PluginField":
        _member("PluginField", "__init__")
        return _Field
    if name == "PluginFieldCollection":
        _known_class(name)
        return list
    _known_class(name)
    return getattr(module, name)


class _CheckedEnum:
    def __init__(self, name: str, enum: Any) -> None:
        self._name = name
        self._enum = enum

    def __getattr__(self, member: str) -> Any:
        if member not in MANIFEST["enums"][self._name]:
            raise UnknownApiError(f"enum {self._name} has no {member}")
        return member if self._name in ("TensorRTPhase", "PluginFieldType") else getattr(self._enum, member)


def _known_class(name: str) -> None:
    if name not in MANIFEST["classes"]:
        raise UnknownApiError(f"TensorRT has no {name}")


def _member(kind: str, name: str) -> str:
    _known_class(kind)
    members = MANIFEST["classes"][kind]
    if name not in members:
        raise UnknownApiError(f"{kind} has no {name}")
    return str(members[name])
