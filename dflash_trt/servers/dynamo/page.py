"""The page at GET / of the gateway: one file, which asks nothing of any other server."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Final

from dflash_trt.servers.dynamo.settings import PageSettings

_FILE: Final = "page.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """An answer in HTML. Of all scripts and styles only its own run in a browser: their hashes are in its policy."""

    body: bytes
    headers: Mapping[str, str]


def read_page(settings: PageSettings) -> Page:
    text = resources.files(__package__).joinpath(_FILE).read_text("utf-8")
    body = text.replace("<body ", f'<body data-server="{escape(settings.model_dump_json())}" ', 1)
    return Page(
        body=body.encode(),
        headers={
            "Content-Type": "text/html; charset=utf-8",
            "Content-Security-Policy": _policy(text),
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        },
    )


def _policy(text: str) -> str:
    """See https://www.w3.org/TR/CSP3/."""
    directives = {
        "default-src": "'none'",
        "script-src": _hash(text, "script"),
        "style-src": _hash(text, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return "; ".join(f"{name} {value}" for name, value in directives.items())


def _hash(text: str, element: str) -> str:
    (content,) = re.findall(f"<{element}>(.*?)</{element}>", text, flags=re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
