"""The wheel has the sources of the plugin library, which stand outside of the package. Else see pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPlugins(build_py):
    """Copies `plugins/` into the package: `dflash-trt build-plugin` compiles it there."""

    def run(self):
        super().run()
        if self.editable_mode:  # a checkout has them
            return
        ignored = shutil.ignore_patterns("tests", "__pycache__", "*.md", ".*")
        sources = Path(self.build_lib) / "dflash_trt" / "plugin_sources" / "plugins"
        shutil.copytree("plugins", sources, ignore=ignored, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithPlugins})
