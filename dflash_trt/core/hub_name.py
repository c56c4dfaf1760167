"""Names of checkpoints on the Hugging Face hub: OWNER/NAME, or OWNER/NAME@REVISION."""

import re
from typing import Self

from dflash_trt.core.frozen import Frozen

_PART = r"[A-Za-z0-9](?:[\w.-]*\w)?"  # of huggingface_hub's rules for names those that tell them from paths
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
