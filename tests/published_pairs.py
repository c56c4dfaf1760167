"""config.json files of published targets and drafters, as directories."""

import pytest

from scripts.published_configs import PACKAGE, repositories
from scripts.published_shapes import write_config

__all__ = ["needs_published_configs", "write_config"]

needs_published_configs = pytest.mark.skipif(not repositories(), reason=f"{PACKAGE} is not installed")
