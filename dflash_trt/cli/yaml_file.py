"""A YAML file as plain fields, without trust: one mapping, no key twice, only plain types."""

from pathlib import Path
from typing import Any

from dflash_trt.core.errors import ConfigError, problem


def read_yaml(path: Path) -> dict[str, Any]:
    """The top-level mapping of a file.

    Raises:
        ConfigError: no such file, no YAML, or no mapping with text keys.
    """
    import yaml

    try:
        text = path.read_bytes().decode()
        fields = yaml.load(text, Loader=_unique_loader())  # derived from SafeLoader
    except OSError as error:
        found = f"{error.strerror}"
        raise ConfigError(problem(str(path), expected="a YAML file", found=found, mend="Check the path.")) from error
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        found = " ".join(str(error).split())
        raise ConfigError(problem(str(path), expected="valid YAML", found=found, mend="Correct the file.")) from error
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        found = "nothing" if fields is None else f"a {type(fields).__name__}"
        mend = "Write one 'key: value' per line; build_configs/demo.yaml is an example."
        raise ConfigError(problem(str(path), expected="a mapping of keys to values", found=found, mend=mend))
    return fields


def _unique_loader() -> Any:
    """SafeLoader that refuses what it would otherwise drop without a word: the first of two equal keys."""
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", node.start_mark)
            return super().construct_mapping(node, deep)

    return UniqueKeyLoader
