"""A stand-in for the Hugging Face hub: the routes that huggingface_hub's snapshot_download asks, over directories.

It answers as https://huggingface.co does: commits, trees, files with an ETag, and errors named in X-Error-Code.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

_ROUTE = re.compile(
    r"/(?:api/models/(?P<api>[^/]+/[^/]+)(?:/(?P<part>revision|tree)/(?P<api_revision>[^/?]+))?"
    r"|(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+?))(?:\?.*)?"
)


@dataclass(kw_only=True)
class Repository:
    """`revisions` are directories by branch or tag."""

    revisions: dict[str, Path]
    is_gated: bool = False

    def directory(self, revision: str) -> Path | None:
        return self.revisions.get(revision) or next(
            (path for path in self.revisions.values() if commit_of(path) == revision), None
        )


@dataclass(kw_only=True)
class Hub:
    """`files` are those that were downloaded. `token` opens gated repositories."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    token: str = "hf_stand_in"
    endpoint: str = ""
    files: list[str] = field(default_factory=list)

    def add(self, name: str, directory: Path, *, is_gated: bool = False, **revisions: Path) -> None:
        self.repositories[name] = Repository(revisions={"main": directory, **revisions}, is_gated=is_gated)


def commit_of(directory: Path) -> str:
    return hashlib.sha1(str(directory).encode()).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        close_session()


def point_at(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_ENDPOINT and HF_HOME do, which are read when huggingface_hub is imported. Without a token, and online."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._respond()

    def do_HEAD(self) -> None:
        self._respond()

    def log_message(self, format: str, *args: Any) -> None: ...

    def _respond(self) -> None:
        route = _ROUTE.fullmatch(self.path)
        repository = route and self.hub.repositories.get(route["api"] or route["repository"])
        if route is None or repository is None:
            return self._fail(401, "RepoNotFound" if self._has_token() else None)
        directory = repository.directory(unquote(route["api_revision"] or route["revision"] or "main"))
        if directory is None:
            return self._fail(404, "RevisionNotFound")
        if route["file"]:
            return self._send_file(repository, directory, route["file"])
        if route["part"] == "tree":
            return self._send(json.dumps(list(_tree(directory))).encode())
        fields = {"id": route["api"], "modelId": route["api"], "sha": commit_of(directory), "siblings": []}
        return self._send(json.dumps(fields | {"tags": [], "private": False, "gated": repository.is_gated}).encode())

    def _send_file(self, repository: Repository, directory: Path, name: str) -> None:
        if repository.is_gated and not self._has_token():
            return self._fail(401, "GatedRepo")
        if not (directory / name).is_file():
            return self._fail(404, "EntryNotFound")
        if self.command == "GET":
            self.hub.files.append(name)
        content = (directory / name).read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        return self._send(content, {"ETag": etag, "X-Repo-Commit": commit_of(directory)})

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _fail(self, status: int, code: str | None) -> None:
        self._send(b"{}", {} if code is None else {"X-Error-Code": code}, status=status)

    def _send(self, content: bytes, headers: dict[str, str] | None = None, *, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def _tree(directory: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        content = path.read_bytes()
        fields = {"type": "file", "path": path.relative_to(directory).as_posix(), "size": len(content)}
        yield fields | {"oid": hashlib.sha1(content).hexdigest()}
