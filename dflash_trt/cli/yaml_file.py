"""Untrusted YAML as plain fields: one small mapping, no duplicate keys, no aliases, only plain types."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

from dflash_trt.core.errors import ConfigError

_MAX_BYTES = 256 * 2**10  # PyYAML reads about 100 kB a second


def read_yaml(path: Path) -> dict[str, Any]:
    """The top-level mapping of a file.

    Raises:
        ConfigError: no such file, no YAML, or no mapping with text keys.
    """
    import yaml

    try:
        num_bytes = path.stat().st_size
        if num_bytes > _MAX_BYTES:
            raise ValueError(f"{num_bytes} bytes, more than {_MAX_BYTES}")
        text = path.read_bytes().decode()
        fields = yaml.load(text, Loader=_unique_loader())  # derived from SafeLoader
    except OSError as error:
        found = f"{error.strerror}"
        raise ConfigError.about(str(path), expected="a YAML file", found=found, hint="Check the path.") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:  # ValueError: bad UTF-8, no such date, 5,000 digits
        found = " ".join(str(error).split())
        raise ConfigError.about(str(path), expected="valid YAML", found=found) from error
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        found = "nothing" if fields is None else f"a {type(fields).__name__}"
        hint = "Write one 'key: value' per line, for example 'target: Qwen/Qwen3-8B'."
        raise ConfigError.about(str(path), expected="a mapping of keys to values", found=found, hint=hint)
    return fields


def _unique_loader() -> Any:
    """A SafeLoader that refuses duplicate keys, which it would silently drop, and aliases.

    A few aliases can stand for more values than fit into memory.
    """
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):
        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()  # type: ignore[no-untyped-call]
                found = f"an alias, *{event.anchor}: write the value out"
                raise yaml.composer.ComposerError(None, None, found, event.start_mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if isinstance(key, Hashable):  # the base class refuses the others
                    if key in seen:
                        raise yaml.constructor.ConstructorError(
                            None, None, f"key {key!r} stands twice", node.start_mark
                        )
                    seen.add(key)
            return super().construct_mapping(node, deep)

    return UniqueKeyLoader
