"""The model repository of `llmapi`, TensorRT-LLM's own Triton model, for a tensorrt_llm engine.

NVIDIA's files are copied unchanged from the user's copy; model.yaml, with the engine's arguments, is ours.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.engine_dir.provenance import triton_model, yaml_text
from dflash_trt.servers.triton.pbtxt import read
from dflash_trt.serving.tensorrt_llm.settings import llm_args, resolved_settings

MODEL: Final = "tensorrt_llm"
_VERSION: Final = "1"
_CONFIG: Final = "config.pbtxt"
_SOURCES: Final = (f"{_VERSION}/model.py", f"{_VERSION}/helpers.py", _CONFIG)  # the last makes the directory a model
_MODEL_YAML: Final = f"{_VERSION}/model.yaml"


def write_llmapi(repository: Path, engine: EngineDir, source: Path, runtime: RuntimeConfig) -> Path:
    """Write the model `tensorrt_llm` into `repository`; returns its directory. The bytes are reproducible.

    `source` is triton_backend/all_models/llmapi of TensorRT-LLM's repository, or a directory like it.

    Raises:
        ConfigError: the engine is of another backend, a setting is not TensorRT-LLM's, files of `source` are missing,
            or another model stands there.
    """
    if engine.manifest.backend != "tensorrt_llm":
        hint = "Leave --llmapi out, or build the engine with --backend tensorrt_llm."
        raise ConfigError.about(
            "--llmapi", expected="an engine of TensorRT-LLM", found=engine.manifest.backend, hint=hint
        )
    raise_all(ConfigError, f"--llmapi {source}", list(_source_problems(source)))
    args = llm_args(engine, resolved_settings(engine, runtime, is_running=False))
    text = yaml_text(triton_model(args))
    model_dir = repository / MODEL
    written = model_dir / _MODEL_YAML
    if model_dir.exists() and not written.is_file():
        found, hint = "something else", "Choose another -o, or remove it."
        raise ConfigError.about(str(model_dir), expected="a model of llmapi, or nothing", found=found, hint=hint)
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_text(text)
    for name in _SOURCES:
        shutil.copyfile(source / MODEL / name, model_dir / name)
    return model_dir


def _source_problems(source: Path) -> Iterator[str]:
    hint = "Pass triton_backend/all_models/llmapi of TensorRT-LLM's repository or container."
    for name in _SOURCES:
        path = source / MODEL / name
        if not path.is_file():
            yield problem(str(path), expected="a file of TensorRT-LLM", found="none", hint=hint)
    config = source / MODEL / _CONFIG
    if config.is_file() and read(config.read_text(), subject=str(config)).one("name") != MODEL:
        yield problem(str(config), expected=f"a model named {MODEL}", found="another", hint=hint)
