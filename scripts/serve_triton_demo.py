"""Serves the demo engine behind a real tritonserver and shows what comes out. Run it by scripts/serve_triton_demo."""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_trt import LLM, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.servers.triton.repository import Deployment, write_model
from dflash_trt.servers.triton.settings import ModelSettings
from scripts.train_demo.prompts import held_out_prompts
from scripts.triton_server import aiperf
from scripts.triton_server.launcher import HOST, ServerProcess

ROOT = Path(__file__).resolve().parents[1]
INSTALLATION = ROOT / ".triton_server"
MODEL = "dflash"
AIPERF = "aiperf==0.13.0"
READ_TIMEOUT_S = 120  # between two lines of a stream: a server whose model has died says nothing more
_SHOWN_METRICS = ("requests_total", "output_tokens_total", "verify_blocks_total", "draft_tokens_total")
_SHOWN_METRICS += ("accepted_tokens_total", "accepted_tokens_at_position_total", "time_to_first_token_seconds_")
_SHOWN_METRICS += ("pages_in_use",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", type=Path, default=ROOT / "build" / "demo")
    parser.add_argument("--prompt", default="import os\nimport sys\n\ndef main():\n")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--benchmark", action="store_true", help="tokens per second against the engine alone")
    parser.add_argument("--aiperf", action="store_true", help="run aiperf; installs it first (1.2 GB)")
    parser.add_argument("--aiperf-environment", type=Path, default=INSTALLATION / "aiperf")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    told = parser.parse_args()
    with serving(told.engine, num_threads=told.num_threads, enable_prefix_caching=not told.benchmark) as server:
        if told.benchmark:
            benchmark(server, told.engine, told.streams, told.rounds, told.max_tokens, told.num_threads)
        elif told.aiperf:
            run_aiperf(server, told.engine, told.aiperf_environment, told.streams)
        else:
            demonstrate(server, told.prompt, told.max_tokens)
    print(f"server stopped, {len(server.members())} processes left")


@contextlib.contextmanager
def serving(engine: Path, *, num_threads: int, enable_prefix_caching: bool) -> Iterator[ServerProcess]:
    settings = ModelSettings(
        engine_dir=str(engine),
        runtime=RuntimeConfig(num_threads=num_threads, enable_prefix_caching=enable_prefix_caching),
    )
    deployment = Deployment(model_name=MODEL, settings=settings, environment=INSTALLATION / "environment")
    repository = ROOT / "build" / "models"
    write_model(repository, deployment)
    started = time.monotonic()
    with ServerProcess(repository, INSTALLATION, ROOT / "build" / "tritonserver.log") as server:
        print(f"tritonserver at {server.url}, ready after {time.monotonic() - started:.1f} s", flush=True)
        yield server


def demonstrate(server: ServerProcess, prompt: str, max_tokens: int) -> None:
    body = {"text_input": prompt, "max_tokens": max_tokens, "stream": True}
    curl = "curl -sN --speed-limit 1 --speed-time 30"
    print(f"\n$ {curl} {server.url}/v2/models/{MODEL}/generate_stream -d '{json.dumps(body)}'\n")
    connection = http.client.HTTPConnection(HOST, server.http_port, timeout=READ_TIMEOUT_S)
    connection.request("POST", f"/v2/models/{MODEL}/generate_stream", json.dumps(body))
    response = connection.getresponse()
    last: dict[str, Any] = {}
    num_responses = 0
    print(prompt, end="", flush=True)
    for line in response:
        if line.startswith(b"data: "):
            last = json.loads(line.removeprefix(b"data: "))
            if "error" in last:
                sys.exit(f"error: {last['error']}")
            num_responses += 1
            print(last["text_output"], end="", flush=True)
    connection.close()
    print(
        f"\n\n{last['num_output_tokens']} tokens in {num_responses} responses; acceptance length "
        f"{last['acceptance_length']:.2f}, bonus included; {last['total_accepted_draft_tokens']} of "
        f"{last['total_draft_tokens']} drafts accepted; finish_reason {last['finish_reason']}\n"
    )
    time.sleep(1.0)  # metrics are published twice a second
    for series, value in sorted(server.metrics().items()):
        name = series.partition("{")[0].removeprefix("dflash_trt_")
        if any(name.startswith(shown) for shown in _SHOWN_METRICS) and not name.endswith("_bucket") and value:
            print(f"{series} {value:g}")
    print()


def benchmark(
    server: ServerProcess, engine: Path, num_streams: int, num_rounds: int, max_tokens: int, num_threads: int
) -> None:
    """Both sides get the same prompts, all at once, and make the same number of tokens, with prefix reuse off.

    Processor time says where the difference goes: to the processes of the server, or to this one, which is the client.
    """
    prompts = held_out_prompts(num_streams)
    sampling = SamplingParams(max_new_tokens=max_tokens, ignore_eos=True)
    num_tokens = num_streams * max_tokens
    rounds = []
    with LLM(engine, num_threads=num_threads, enable_prefix_caching=False) as llm:
        for round_index in range(num_rounds + 1):
            started, cpu = time.perf_counter(), time.process_time()
            outputs = llm.generate(prompts, [sampling] * num_streams)
            alone_s, alone_cpu_s = time.perf_counter() - started, time.process_time() - cpu
            started, cpu, server_cpu = time.perf_counter(), time.process_time(), cpu_s(server)
            token_ids = asyncio.run(ask_all(server, prompts, max_tokens))
            served_s, client_cpu_s = time.perf_counter() - started, time.process_time() - cpu
            server_cpu_s = [later - before for later, before in zip(cpu_s(server), server_cpu, strict=True)]
            assert token_ids == [list(output.token_ids) for output in outputs], "Triton gave other tokens"
            print(
                f"round {round_index}: engine alone {num_tokens / alone_s:.0f} tok/s, through Triton "
                f"{num_tokens / served_s:.0f} tok/s, ratio {alone_s / served_s:.3f}; processor time "
                f"{alone_cpu_s:.2f} s alone, through Triton {server_cpu_s[1]:.2f} s model, {server_cpu_s[0]:.2f} s "
                f"server, {client_cpu_s:.2f} s client{' (warm-up, does not count)' if round_index == 0 else ''}",
                flush=True,
            )
            rounds.append((alone_s, served_s, alone_cpu_s, server_cpu_s[1], server_cpu_s[0], client_cpu_s))
    ratios = [alone_s / served_s for alone_s, served_s, *_ in rounds[1:]]
    medians = [statistics.median(values) for values in zip(*rounds[1:], strict=True)]
    print(
        f"{num_streams} streams of {max_tokens} tokens, {len(os.sched_getaffinity(0))} cores, medians of {num_rounds} "
        f"rounds: engine alone {num_tokens / medians[0]:.0f} tok/s, through Triton "
        f"{num_tokens / medians[1]:.0f} tok/s, ratio {statistics.median(ratios):.3f} "
        f"({', '.join(f'{ratio:.2f}' for ratio in ratios)}); processor time "
        f"{medians[2]:.2f} s alone, {medians[3]:.2f} s model, {medians[4]:.2f} s server, {medians[5]:.2f} s client"
    )


def cpu_s(server: ServerProcess) -> tuple[float, float]:
    """Processor time so far of the server's own process, and of the processes of its models."""
    found = {}
    for pid in server.members():
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        found[pid] = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return found[server.pid], sum(seconds for pid, seconds in found.items() if pid != server.pid)


async def ask_all(server: ServerProcess, prompts: list[str], max_tokens: int) -> list[list[int]]:
    return await asyncio.gather(*(ask(server, prompt, max_tokens) for prompt in prompts))


async def ask(server: ServerProcess, prompt: str, max_tokens: int) -> list[int]:
    """The token ids of one SSE stream, read as cheaply as Python can: client and server share the cores."""
    body = json.dumps({"text_input": prompt, "max_tokens": max_tokens, "stream": True, "end_id": -1}).encode()
    reader, writer = await asyncio.open_connection(HOST, server.http_port)
    head = f"POST /v2/models/{MODEL}/generate_stream HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
    token_ids: list[int] = []
    is_last = False
    while not is_last and (line := await asyncio.wait_for(reader.readline(), READ_TIMEOUT_S)):
        if line.startswith(b"data: "):
            fields = json.loads(line[6:])
            ids = fields["output_ids"]
            token_ids += ids if isinstance(ids, list) else [ids]
            is_last = "finish_reason" in fields
    writer.close()
    return token_ids


def run_aiperf(server: ServerProcess, engine: Path, environment: Path, concurrency: int) -> None:
    program = environment / "bin" / "aiperf"
    if not program.exists():
        print(f"installing {AIPERF} into {environment} (1.2 GB)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        subprocess.run([environment / "bin" / "pip", "-qq", "install", AIPERF], check=True)
    output = ROOT / "build" / "aiperf"
    output.mkdir(parents=True, exist_ok=True)
    payload = output / "payload.j2"
    payload.write_text(aiperf.PAYLOAD_TEMPLATE)
    words = aiperf.command(
        program,
        server.url,
        model_name=MODEL,
        payload=payload,
        tokenizer=(engine / "tokenizer").resolve(),
        output=output,
        concurrency=concurrency,
        count=concurrency * 4,
    )
    with (output / "log").open("w") as log:
        ran = subprocess.run(words, check=False, stdout=log, stderr=subprocess.STDOUT)
    if ran.returncode:
        sys.exit(f"error: aiperf: expected exit code 0, found {ran.returncode}. See {output / 'log'}.")
    report = aiperf.read_report(output / aiperf.REPORT_NAME)
    print(
        f"aiperf, {concurrency} at a time: {report.num_requests} requests, {report.num_errors} errors, "
        f"{report.request_per_s:.2f} requests/s, {report.output_tok_per_s:.0f} tok/s by aiperf's count; time to first "
        f"token median {report.time_to_first_token_p50_ms:.0f} ms, inter-token latency mean "
        f"{report.inter_token_latency_mean_ms:.1f} ms"
    )


if __name__ == "__main__":
    main()
