"""Writes an engine's model repository, and checks an existing one. Equal calls write equal bytes.

A repository is a directory of models; this module writes one model and touches no other.
"""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_trt.core.errors import ConfigError, DFlashError, EngineDirError, problem, raise_all
from dflash_trt.engine_dir import EngineDir
from dflash_trt.servers.triton.environment import check_gpus_of_ranks, check_numpy
from dflash_trt.servers.triton.pbtxt import Message, Value, Word, read, write
from dflash_trt.servers.triton.settings import ENVIRONMENT_PARAMETER, ModelSettings
from dflash_trt.servers.triton.tensors import INPUTS, OUTPUTS, InputTensor, OutputTensor

CONFIG_NAME = "config.pbtxt"
MODEL_NAME = "model.py"
VERSION = "1"
COPIED_ENGINE = "engine"

_MARK = "# Written by `dflash-trt deploy triton`."
_MODEL_SOURCE = f'''{_MARK}
"""Loads an engine of dflash-trt; config.pbtxt says which and how."""

import sys

try:
    from dflash_trt.servers.triton.model import TritonPythonModel
except ModuleNotFoundError as error:
    if error.name != "dflash_trt":
        raise
    raise ModuleNotFoundError(
        f"Python environment of the server: expected dflash-trt, found none in {{sys.prefix}}. "
        "Install it there, or deploy with --environment naming the environment that has it."
    ) from None

__all__ = ["TritonPythonModel"]
'''
_ENVIRONMENT_PROBE = "import json, dflash_trt, numpy; print(json.dumps([numpy.__version__, dflash_trt.__version__]))"
_PROBE_TIMEOUT_S = 120


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The model to write. Each of `gpus` gets an instance; an engine of N ranks takes N GPUs an instance.

    Without `gpus`, `num_instances` run on the CPU.
    """

    model_name: str
    settings: ModelSettings
    environment: Path | None = None
    num_instances: int = 1
    gpus: tuple[int, ...] = ()
    has_batch_dimension: bool = False
    copies_engine: bool = False


def write_model(repository: Path, deployment: Deployment) -> Path:
    """Write one model into `repository`; its directory.

    Raises:
        EngineDirError: the engine cannot be opened.
        ConfigError: another model stands there, or the deployment cannot work.
    """
    engine_dir = Path(deployment.settings.engine_dir)
    num_ranks = EngineDir.open(engine_dir).manifest.pretrained_config.mapping.world_size
    _check(repository, deployment, num_ranks)
    model_dir = repository / deployment.model_name
    config_path = model_dir / CONFIG_NAME
    if model_dir.exists() and not _is_ours(config_path):
        raise ConfigError.about(
            str(model_dir),
            expected="a model written by `dflash-trt deploy triton`, or nothing",
            found="something else",
            hint="Choose another --model-name, or remove it.",
        )
    version_dir = model_dir / VERSION
    version_dir.mkdir(parents=True, exist_ok=True)
    if deployment.copies_engine:
        _copy_engine(engine_dir, version_dir / COPIED_ENGINE)
    named = COPIED_ENGINE if deployment.copies_engine else str(engine_dir.resolve())
    settings = replace(
        deployment.settings, engine_dir=named, gpu_device_ids=_gpu_device_ids(deployment.gpus, num_ranks)
    )
    _put(version_dir / MODEL_NAME, _MODEL_SOURCE)
    _put(config_path, config_text(replace(deployment, settings=settings)))  # last: it makes the directory a model
    return model_dir


def config_text(deployment: Deployment) -> str:
    """config.pbtxt."""
    parameters = deployment.settings.parameters()
    if deployment.environment is not None:
        parameters[ENVIRONMENT_PARAMETER] = str(deployment.environment.resolve())
    message = Message(
        [
            ("name", deployment.model_name),
            ("backend", "python"),
            ("max_batch_size", int(deployment.has_batch_dimension)),
            ("model_transaction_policy", Message([("decoupled", True)])),
            ("instance_group", _instance_group(deployment)),
            *(("parameters", _parameter(name, text)) for name, text in sorted(parameters.items())),
            *(("input", _tensor(tensor)) for tensor in INPUTS),
            *(("output", _tensor(tensor)) for tensor in OUTPUTS),
        ]
    )
    return f"{_MARK} Running it again with the same options changes nothing.\n{write(message)}"


def check_model(model_dir: Path) -> ModelSettings:
    """Check everything about a written model that can be checked without a server; its settings.

    Raises:
        ConfigError: every problem found.
    """
    config_path = model_dir / CONFIG_NAME
    if not config_path.is_file():
        raise ConfigError.about(
            str(model_dir),
            expected=f"a model with a {CONFIG_NAME}",
            found="none",
            hint="Write it with `dflash-trt deploy triton ENGINE_DIR -o MODEL_REPOSITORY`.",
        )
    config = read(config_path.read_text(), subject=str(config_path))
    problems = [*_config_problems(config, model_dir.name), *_file_problems(model_dir)]
    settings: ModelSettings | None = None
    try:
        parameters = _parameters(config)
        settings = ModelSettings.from_parameters(parameters)
        engine = EngineDir.open(settings.engine_path(model_dir / VERSION))
        for gpus in _gpus_of_instances(config, settings):
            check_gpus_of_ranks(gpus, engine.manifest.pretrained_config.mapping.world_size)
        if ENVIRONMENT_PARAMETER in parameters:
            check_environment(Path(parameters[ENVIRONMENT_PARAMETER]), accepts_numpy_2=settings.accepts_numpy_2)
    except DFlashError as error:
        problems.append(str(error))
    raise_all(ConfigError, str(model_dir), problems)
    assert settings is not None
    return settings


def check_environment(environment: Path, *, accepts_numpy_2: bool) -> None:
    """A virtual environment that the server can run the model in.

    Raises:
        ConfigError: it is none, or lacks dflash-trt or the right numpy.
    """
    python = environment / "bin" / "python"
    hint = (
        "Name a virtual environment with dflash-trt and 'numpy<2'; scripts/install_triton_server of a source checkout "
        "makes one."
    )
    if not python.exists() or not (environment / "bin" / "activate").exists():
        raise ConfigError.about(str(environment), expected="a virtual environment", found="none", hint=hint)
    try:
        ran = subprocess.run(
            [python, "-I", "-c", _ENVIRONMENT_PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        found = error.stderr.strip().rpartition("\n")[2]
        raise ConfigError.about(
            str(environment), expected="dflash-trt and numpy in it", found=found, hint=hint
        ) from None
    check_numpy(json.loads(ran.stdout)[0], accepts_numpy_2=accepts_numpy_2)


def model_dirs(repository: Path) -> list[Path]:
    """The models in a repository that this module wrote."""
    if not repository.is_dir():
        return []
    return sorted(path for path in repository.iterdir() if _is_ours(path / CONFIG_NAME))


def _check(repository: Path, deployment: Deployment, num_ranks: int) -> None:
    problems = [*_shell_problems(repository, deployment)]
    name = deployment.model_name
    if not name or name in (".", "..") or "/" in name:
        problems.append(problem("model name", expected="a file name", found=repr(name), hint="Choose another."))
    if deployment.num_instances < 1 or (deployment.gpus and deployment.num_instances != 1):
        problems.append(
            problem(
                "instances",
                expected="1 or more on a CPU, or one per GPU of --gpus",
                found=str(deployment.num_instances),
                hint="Pass --instances or --gpus.",
            )
        )
    if len(set(deployment.gpus)) != len(deployment.gpus) or any(gpu < 0 for gpu in deployment.gpus):
        problems.append(problem("gpus", expected="distinct indices", found=str(list(deployment.gpus))))
    if len(deployment.gpus) % num_ranks:
        expected = f"{num_ranks} for each instance, one for each rank of the engine"
        problems.append(problem("gpus", expected=expected, found=str(list(deployment.gpus)), hint="Pass --gpus."))
    raise_all(ConfigError, "deployment", problems)
    if deployment.environment is not None:
        check_environment(deployment.environment, accepts_numpy_2=deployment.settings.accepts_numpy_2)


def _shell_problems(repository: Path, deployment: Deployment) -> Iterator[str]:
    """The server's Python backend writes these into a shell command as they are; a space hangs its start."""
    named = {"model repository": repository.resolve() / deployment.model_name, "environment": deployment.environment}
    for subject, path in named.items():
        if path is not None and shlex.quote(str(path)) != str(path):
            hint = "Use letters, digits and @%+=:,./-_ alone."
            yield problem(subject, expected="a path without spaces or quotes", found=repr(str(path)), hint=hint)


def _gpu_device_ids(gpus: Sequence[int], num_ranks: int) -> str | None:
    """GPUs of each instance of several ranks: "0,1;2,3". Triton itself gives an instance one GPU at most."""
    if not gpus or num_ranks == 1:
        return None
    return ";".join(",".join(map(str, gpus[i : i + num_ranks])) for i in range(0, len(gpus), num_ranks))


def _instance_group(deployment: Deployment) -> Message:
    num_groups = len(deployment.settings.instance_gpus)
    if num_groups:
        return Message([("count", num_groups), ("kind", Word("KIND_MODEL"))])
    if deployment.gpus:
        return Message([("count", 1), ("kind", Word("KIND_GPU")), ("gpus", list(deployment.gpus))])
    return Message([("count", deployment.num_instances), ("kind", Word("KIND_CPU"))])


def _gpus_of_instances(config: Message, settings: ModelSettings) -> Sequence[tuple[int, ...]]:
    groups = [group for group in config.all("instance_group") if isinstance(group, Message)]
    return settings.instance_gpus or [(0,) for group in groups if group.one("kind") == "KIND_GPU"]


def _parameter(name: str, text: str) -> Message:
    return Message([("key", name), ("value", Message([("string_value", text)]))])


def _parameters(config: Message) -> dict[str, str]:
    entries = [entry for entry in config.all("parameters") if isinstance(entry, Message)]
    texts = {str(entry.one("key")): entry.one("value") for entry in entries}
    return {name: str(value.one("string_value")) for name, value in texts.items() if isinstance(value, Message)}


def _tensor(tensor: InputTensor | OutputTensor) -> Message:
    fields: list[tuple[str, Value]] = [
        ("name", tensor.name),
        ("data_type", Word(f"TYPE_{tensor.type}")),
        ("dims", list(tensor.dims)),
    ]
    if isinstance(tensor, InputTensor):  # each of them: the model itself says what is missing
        fields.append(("optional", True))
    return Message(fields)


def _config_problems(config: Message, directory_name: str) -> Iterator[str]:
    policy = config.one("model_transaction_policy")
    facts: tuple[tuple[str, object, object], ...] = (
        ("name", directory_name, config.one("name") or directory_name),
        ("backend", "python", config.one("backend")),
        ("max_batch_size", "0 or 1", config.one("max_batch_size") or 0),
        ("decoupled", True, policy.one("decoupled") if isinstance(policy, Message) else None),
    )
    for name, expected, found in facts:
        is_right = found in (0, 1) if name == "max_batch_size" else found == expected
        if not is_right:
            hint = "Write the model again."
            yield problem(f"{CONFIG_NAME} {name}", expected=str(expected), found=str(found), hint=hint)
    yield from _tensor_problems(config, "input", INPUTS)
    yield from _tensor_problems(config, "output", OUTPUTS)


def _tensor_problems(config: Message, field: str, tensors: Sequence[InputTensor | OutputTensor]) -> Iterator[str]:
    """Every tensor that is missing, different or unknown."""
    found = {entry.one("name"): _facts(entry) for entry in config.all(field) if isinstance(entry, Message)}
    expected = {tensor.name: _facts(_tensor(tensor)) for tensor in tensors}
    for name in [*expected, *(name for name in found if name not in expected)]:
        if found.get(name) != expected.get(str(name)):
            yield problem(
                f"{CONFIG_NAME} {field} '{name}'",
                expected=_shown(expected.get(str(name))),
                found=_shown(found.get(name)),
                hint="Write the model again with this version of dflash-trt.",
            )


def _facts(tensor: Message) -> tuple[object, ...]:
    return tensor.one("data_type"), tuple(map(str, tensor.all("dims"))), bool(tensor.one("optional"))


def _shown(facts: tuple[object, ...] | None) -> str:
    if facts is None:
        return "none"
    dtype, dims, is_optional = facts
    return f"{dtype} [{', '.join(map(str, dims)) if isinstance(dims, tuple) else dims}]" + " optional" * bool(
        is_optional
    )


def _file_problems(model_dir: Path) -> Iterator[str]:
    path = model_dir / VERSION / MODEL_NAME
    if not path.is_file() or path.read_text() != _MODEL_SOURCE:
        found = "another" if path.is_file() else "none"
        hint = "Write the model again."
        yield problem(str(path), expected="the model of this version of dflash-trt", found=found, hint=hint)


def _is_ours(config_path: Path) -> bool:
    return config_path.is_file() and config_path.read_text().startswith(_MARK)


def _copy_engine(engine_dir: Path, copy: Path) -> None:
    """Replace `copy` unless it is the same engine already; whole or not at all."""
    if copy.is_dir():
        try:
            if EngineDir.open(copy).manifest == EngineDir.open(engine_dir).manifest:
                return
        except EngineDirError:
            pass  # half a copy, or an older one
    temporary = copy.with_name(f".{copy.name}.tmp")
    for path in (temporary, copy):
        if path.exists():
            shutil.rmtree(path)
    shutil.copytree(engine_dir, temporary)
    temporary.rename(copy)


def _put(path: Path, text: str) -> None:
    """Write unless it stands there already, so that a polling server sees no change."""
    if path.is_file() and path.read_text() == text:
        return
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
