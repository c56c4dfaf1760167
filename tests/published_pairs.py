"""config.json files of published targets and drafters, as directories."""

from scripts.published_shapes import write_config

__all__ = ["write_config"]
