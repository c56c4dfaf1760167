"""How clients talk to the server: HTTP and SSE by httpx, gRPC by tritonclient."""

import json
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from dflash_trt.servers.triton.tensors import INPUTS_BY_NAME
from scripts.triton_server.launcher import ServerProcess

WAIT_S = 60.0
_DATATYPES = {"STRING": ("BYTES", np.object_), "BOOL": ("BOOL", np.bool_), "INT32": ("INT32", np.int32)}
_DATATYPES |= {"FP32": ("FP32", np.float32), "UINT64": ("UINT64", np.uint64)}


@dataclass
class Answer:
    """A finished stream: the fields of its last response, and all tokens and texts."""

    responses: list[dict[str, Any]] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for response in self.responses for token_id in as_list(response.get("output_ids", []))]

    @property
    def text(self) -> str:
        return "".join(response.get("text_output", "") for response in self.responses)

    @property
    def last(self) -> dict[str, Any]:
        return self.responses[-1]


def as_list(value: Any) -> list[Any]:
    """Triton's generate endpoint writes a list of one as its element."""
    return value if isinstance(value, list) else [value]


def generate(server: ServerProcess, model: str = "dflash", **fields: Any) -> dict[str, Any]:
    """One answer over HTTP; the JSON object, which has an `error` when the request failed."""
    response = httpx.post(f"{server.url}/v2/models/{model}/generate", json=fields, timeout=WAIT_S)
    return dict(response.json()) | {"status": response.status_code}


@contextmanager
def sse(
    server: ServerProcess, model: str = "dflash", *, read_timeout_s: float = WAIT_S, **fields: Any
) -> Iterator[Iterator[dict[str, Any]]]:
    """A stream of responses over HTTP; leaving the block closes the connection."""
    url = f"{server.url}/v2/models/{model}/generate_stream"
    with (
        httpx.Client(timeout=httpx.Timeout(WAIT_S, read=read_timeout_s)) as client,
        client.stream("POST", url, json=fields, headers={"Connection": "close"}) as response,
    ):
        lines = response.iter_lines()
        yield (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))


def stream(server: ServerProcess, model: str = "dflash", **fields: Any) -> Answer:
    with sse(server, model, **fields) as responses:
        return Answer(list(responses))


def grpc_inputs(module: Any, fields: dict[str, Any], *, has_batch_dimension: bool = False) -> list[Any]:
    inputs = []
    for name, value in fields.items():
        datatype, dtype = _DATATYPES[INPUTS_BY_NAME[name].type]
        values = [item.encode() if isinstance(item, str) else item for item in as_list(value)]
        array = np.array([values] if has_batch_dimension else values, dtype=dtype)
        tensor = module.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def grpc_fields(result: Any) -> dict[str, Any]:
    """The outputs of one gRPC response, as the HTTP endpoint would write them."""
    fields: dict[str, Any] = {}
    for output in result.get_response().outputs:
        values = result.as_numpy(output.name).reshape(-1).tolist()
        values = [value.decode() if isinstance(value, bytes) else value for value in values]
        fields[output.name] = values if output.name in ("output_ids", "output_log_probs") else values[0]
    return fields


class GrpcStream:
    """One gRPC stream with one request on it."""

    def __init__(self, tritonclient: Any, server: ServerProcess, model: str = "dflash", **fields: Any) -> None:
        self.request_id = fields.pop("request_id", "")
        has_batch_dimension = fields.pop("has_batch_dimension", False)
        self._client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        self._results: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: self._results.put((result, error)))
        self._client.async_stream_infer(
            model,
            grpc_inputs(tritonclient.grpc, fields, has_batch_dimension=has_batch_dimension),
            request_id=self.request_id,
        )

    def next(self) -> dict[str, Any]:
        """The next response; an error is raised."""
        result, error = self._results.get(timeout=WAIT_S)
        if error is not None:
            raise error
        fields = grpc_fields(result)
        final = result.get_response().parameters.get("triton_final_response")
        return fields | {"is_final": final is not None and final.bool_param}

    def rest(self) -> Answer:
        answer = Answer()
        while not answer.responses or not answer.last["is_final"]:
            answer.responses.append(self.next())
        return answer

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def close(self) -> None:
        self._client.stop_stream()
        self._client.close()


def counter(server: ServerProcess, name: str, model: str = "dflash", **labels: str) -> float:
    """The sum of a metric's series of a model that have these labels."""
    wanted = [f'{label}="{value}"' for label, value in (labels | {"model": model}).items()]
    return sum(
        value
        for series, value in server.metrics().items()
        if series.partition("{")[0] == f"dflash_trt_{name}" and all(part in series for part in wanted)
    )


def until(is_true: Callable[[], bool], what: str, *, timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def load(server: ServerProcess, model: str) -> str | None:
    """Load a model by its repository API; why it could not be loaded."""
    response = httpx.post(f"{server.url}/v2/repository/models/{model}/load", timeout=120)
    return None if response.status_code == 200 else str(response.json()["error"])


def unload(server: ServerProcess, model: str) -> None:
    assert httpx.post(f"{server.url}/v2/repository/models/{model}/unload", timeout=60).status_code == 200
