"""A hook of mkdocs.yml: links that leave docs/ go to the repository, as the site holds docs/ alone."""

import os
import re
from pathlib import PurePosixPath
from typing import Any, Final

_LINK: Final = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)([^)]+)\)")


def on_page_markdown(markdown: str, *, page: Any = None, **_: Any) -> str:
    """Replace such links of a page.

    Without DFLASH_TRT_REPOSITORY_URL, the root of browsable files, such a link is its text alone.
    """
    url = os.environ.get("DFLASH_TRT_REPOSITORY_URL", "").rstrip("/")
    depth = 0 if page is None else len(PurePosixPath(page.file.src_uri).parent.parts)

    def replaced(link: re.Match[str]) -> str:
        text, ups, path = link.groups()
        if ups.count("../") <= depth:
            return link[0]
        return f"[{text}]({url}/{path})" if url else text

    return _LINK.sub(replaced, markdown)
