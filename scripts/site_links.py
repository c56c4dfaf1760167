"""A hook of mkdocs.yml: links that leave docs/ go to the repository, as the site holds docs/ alone."""

import os
import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Of one page. Without DFLASH_TRT_REPOSITORY_URL, the root of browsable files, such a link is its text alone."""
    url = os.environ.get("DFLASH_TRT_REPOSITORY_URL", "").rstrip("/")
    return _OUTSIDE.sub(rf"[\1]({url}/\2)" if url else r"\1", markdown)
