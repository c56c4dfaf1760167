"""A loopback server with the routes of trtllm-serve that a client of completions needs; tokens are the stand-in's."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import torch

from tests.serving.trtllm_stand_in.tensorrt_llm import KNOWN, Model, refused_parameters

MODEL = "target"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, model: Model, speculative: dict[str, Any] | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = model
        self.refused = refused_parameters(speculative)
        self.bodies: list[dict[str, Any]] = []
        self.num_hung_up = 0


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        found = self.path == "/v1/models"
        self._answer(200 if found else 404, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        unknown = sorted(set(body) - set(KNOWN["completion_request"]))
        if self.path != "/v1/completions" or unknown or body["model"] != MODEL or body["prompt"][:2] == [6, 6]:
            self._answer(400, {"error": f"extra fields {unknown}, or a bad prompt"})
            return
        params = sampling_params(body)
        if set(params) & self.server.refused:
            self._answer(400, {"error": f"{sorted(set(params) & self.server.refused)} while drafting"})
            return
        self.server.bodies.append(body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for new, reason, rows in self.server.model.iterations(body["prompt"], params):
                choice = {"index": 0, "text": "", "token_ids": new, "finish_reason": reason, "stop_reason": None}
                if rows:
                    choice["logprobs"] = {key: [] for key in KNOWN["completion_logprobs"]} | {
                        "token_logprobs": [row[token] for token, row in zip(new, rows, strict=True)]
                    }
                assert set(choice) <= set(KNOWN["completion_stream_choice"])
                self._send({"id": "c", "object": "text_completion", "model": MODEL, "choices": [choice]})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.num_hung_up += 1

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


def sampling_params(body: dict[str, Any]) -> dict[str, Any]:
    """SamplingParams of a completion, as trtllm-serve makes them."""
    params = {name: value for name, value in body.items() if name in KNOWN["sampling_params"]}
    if not body.get("logprobs"):
        params.pop("logprobs", None)
    if "logit_bias" in body:
        params["embedding_bias"] = torch.zeros(272)
        for token_id, bias in body["logit_bias"].items():
            params["embedding_bias"][int(token_id)] = bias
    if "response_format" in body:
        form = dict(body["response_format"])
        kind = form.pop("type")
        ((field, guide),) = form.items()
        assert KNOWN["response_format"][kind] == field
        guides = {"json": ("json", json.dumps(guide)), "regex": ("regex", guide), "ebnf": ("grammar", guide)}
        params["guided_decoding"] = dict([guides[kind]])
    return params


@contextmanager
def trtllm_server(model: Model, speculative: dict[str, Any] | None) -> Iterator[tuple[str, _Server]]:
    """Its URL, and what it has seen."""
    server = _Server(model, speculative)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
