"""config.json files as their models' publishers wrote them: those in the wheel of aiconfigurator-core (Apache-2.0).

The wheel is a reference of the tests, listed in requirements/references_alone.in; no file of it is copied into this
tree, and its own code is not run.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "aiconfigurator-core"
_CONFIG, _QUANTIZATION = "_config.json", "_hf_quant_config.json"


def config_directory() -> Path | None:
    """The files' directory; None where the package is not installed."""
    spec = find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "model_configs"


def repositories() -> tuple[str, ...]:
    """OWNER/NAME of each file, sorted; none where the package is not installed."""
    directory = config_directory()
    if directory is None:
        return ()
    names = (path.name for path in directory.glob(f"*{_CONFIG}") if not path.name.endswith(_QUANTIZATION))
    return tuple(sorted(name.removesuffix(_CONFIG).replace("--", "/", 1) for name in names))


def read_config(repository: str) -> dict[str, Any]:
    """Its config.json."""
    fields: dict[str, Any] = json.loads(_file(repository, _CONFIG).read_text())
    return fields


def write_checkpoint(root: Path, repository: str) -> Path:
    """A directory ROOT/OWNER/NAME with its config.json, and its hf_quant_config.json where it has one."""
    directory = root / repository
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_bytes(_file(repository, _CONFIG).read_bytes())
    quantization = _file(repository, _QUANTIZATION)
    if quantization.is_file():
        (directory / "hf_quant_config.json").write_bytes(quantization.read_bytes())
    return directory


def _file(repository: str, suffix: str) -> Path:
    directory = config_directory()
    assert directory is not None, f"{PACKAGE} is not installed"
    return directory / f"{repository.replace('/', '--')}{suffix}"
