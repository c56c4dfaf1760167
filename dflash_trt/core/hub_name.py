"""Names of checkpoints on the Hugging Face hub: OWNER/NAME, or OWNER/NAME@REVISION."""

import re
import shlex
from pathlib import Path
from typing import Self

from dflash_trt.core.frozen import Frozen

_PART = r"[A-Za-z0-9](?:[\w.-]*\w)?"  # huggingface_hub's rules for names that distinguish them from paths
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([\w./-]+))?", re.ASCII)


class HubName(Frozen):
    """A repository; `revision` is a branch, a tag or a commit (default: the main branch)."""

    repository: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """None for text that can only be a path."""
        found = _NAME.fullmatch(text)
        return None if found is None else cls(repository=found[1], revision=found[2])

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


class HubSource(Frozen):
    """Origin of a downloaded checkpoint: `commit` is what `name` stood for."""

    name: str
    commit: str


def build_command(checkpoint: str) -> str:
    """The command that builds an engine from a checkpoint, a name on the hub or a directory."""
    name = HubName.parse(checkpoint)
    is_local = name is None or Path(checkpoint).exists()
    output = f"{Path(checkpoint).absolute().name}-engine" if is_local else str(name).partition("@")[0].partition("/")[2]
    return f"dflash-trt build --target {shlex.quote(checkpoint)} -o {shlex.quote(output.lower())}"
