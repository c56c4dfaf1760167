"""Chat templates in a process of their own: what they give, and that none of them holds up its caller."""

import gc
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash_trt.core.chat_template_options import RESERVED_NAMES
from dflash_trt.core.errors import RequestError
from dflash_trt.engine_dir.template_renderer import TemplateError, TemplateRenderer, _request, max_conversation_bytes
from dflash_trt.serving.text import TextCodec
from tests.serving.engines import until
from tests.serving.tokenizers import CHAT_TEMPLATE, write_byte_level

HELLO = [{"role": "user", "content": "hi <b> & 'you' é \N{PILE OF POO}"}]
FOR_EVER = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
# What the templates of known models use: tools, tojson, namespaces, macros, loop controls, the date, special tokens.
RICH_TEMPLATE = """{%- macro tag(name) -%}<|{{ name }}|>{%- endmacro -%}
{{- bos_token }}{{ strftime_now('%Y') }}
{%- set state = namespace(count=0) %}
{%- if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set state.count = state.count + 1 %}
    {{- tag('im_start') }}{{ message['role'] }}
{% generation %}{{ message.content | trim }}{% endgeneration %}
    {%- if message.tool_calls %}{{ message.tool_calls | map(attribute='function') | list | tojson }}{% endif %}
{%- endfor %}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{{- documents }}{{ state.count }}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"""


def weather(city: str) -> str:
    """Get the weather.

    Args:
        city: Where.
    """
    return city


@pytest.fixture(scope="module")
def renderer() -> TemplateRenderer:
    return TemplateRenderer(time_limit_s=0.5)


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("rich"), chat_template=RICH_TEMPLATE)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_thinking": False},
        {"tools": [{"type": "function", "function": {"name": "<f>", "é": 1.5}}]},
        {"tools": [weather]},
        {"documents": [{"title": "a", "text": "b"}], "bos_token": "<other>"},
    ],
)
def test_the_text_is_that_of_transformers(rich: Path, options: dict[str, Any]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, None, True, 1e300]}}}
    messages = [*HELLO, {"role": "skip"}, {"role": "assistant", "content": "  ok\n", "tool_calls": [call]}]
    theirs = AutoTokenizer.from_pretrained(rich)
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    codec = TextCodec.open(rich)
    assert codec.encode_chat(messages, options) == theirs.encode(expected, add_special_tokens=False)
    assert codec._render(messages, options, None) == expected


def test_templates_by_name_are_chosen_as_transformers_chooses(tmp_path: Path) -> None:
    path = write_byte_level(tmp_path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    codec = TextCodec.open(path)
    assert codec._render(HELLO, {}, None) == "plain"
    assert codec._render(HELLO, {"tools": [{}]}, None) == "tools"


def test_every_argument_of_transformers_is_reserved_or_for_the_template() -> None:
    arguments = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert arguments - {"kwargs", "tools", "documents"} <= RESERVED_NAMES


# Limits


def test_a_template_that_loops_for_ever_is_ended_and_the_next_one_is_rendered(renderer: TemplateRenderer) -> None:
    renderer.start()
    started = time.monotonic()
    with pytest.raises(RequestError, match=r"the chat template's text within 0\.5 s, found one that takes longer"):
        renderer.render(FOR_EVER, HELLO, {})
    assert time.monotonic() - started < 30
    assert renderer.render("{{ messages[0].role }}", HELLO, {}) == "user"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ ('x' * 1000000000) | length }}", "needs at most 512 MiB, found one that needs more"),
        ("{{ 'x' * 5000 }}", "at most 1000 bytes, .*found 5000"),
        ("{{ 'é' * 501 }}", "at most 1000 bytes, .*found 1002"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
        ("{{ ().__class__.__bases__ }}", "SecurityError"),
        ("{{ raise_exception('no ' + messages[0].role) }}", "TemplateError: no user"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{% if %}", "TemplateSyntaxError"),
    ],
)
def test_what_breaks_a_limit_is_refused_by_name(template: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        PATIENT.render(template, HELLO, {}, max_bytes=1000)


def test_text_that_is_just_short_enough_is_taken() -> None:
    assert PATIENT.render("{{ 'é' * 500 }}", HELLO, {}, max_bytes=1000) == "é" * 500


def test_a_conversation_may_have_eight_bytes_for_each_of_its_text_and_a_mebibyte_at_least() -> None:
    assert [max_conversation_bytes(length) for length in (None, 1, 2**17, 2**17 + 1)] == [None, 2**20, 2**20, 2**20 + 8]

    def conversation(num_bytes: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "a" * num_bytes}]

    fixed = len(_request("x", conversation(0), {}, 1))
    assert PATIENT.render("x", conversation(2**20 - fixed), {}, max_bytes=1) == "x"
    with pytest.raises(RequestError, match="at most 1048576 bytes of messages as JSON, found 1048577"):
        PATIENT.render("x", conversation(2**20 - fixed + 1), {}, max_bytes=1)
    assert PATIENT.render("x", conversation(2**21), {}) == "x"


def test_variables_replace_neither_the_messages_nor_the_prompt_of_the_answer() -> None:
    template = "{{ messages[0].role }} {{ add_generation_prompt }} {{ tools }} {{ documents }}"
    given = {"messages": [{"role": "other"}], "add_generation_prompt": False}
    assert PATIENT.render(template, HELLO, given) == "user True None None"
    for name in ("tools", "documents"):
        assert "{'a': 1}" in PATIENT.render(template, HELLO, {name: [{"a": 1}]})
        with pytest.raises(RequestError, match=f"TypeError: {name} should be a list of objects"):
            PATIENT.render(template, HELLO, {name: [{"a": 1}, "b"]})


def test_what_an_error_says_is_cut() -> None:
    with pytest.raises(TemplateError) as error:
        PATIENT.render("{{ raise_exception('a' * 5000) }}", HELLO, {})
    assert error.value.found == "TemplateError: " + "a" * (1000 - len("TemplateError: "))


@pytest.mark.parametrize(("messages", "options"), [([{"role": b"x"}], {}), (HELLO, {"x": {1, 2}})])
def test_what_is_no_json_is_refused(messages: Any, options: Any) -> None:
    with pytest.raises(RequestError, match="of JSON values, found TypeError"):
        PATIENT.render("{{ x }}", messages, options)


def test_one_conversation_that_takes_long_does_not_hold_up_another() -> None:
    patient = TemplateRenderer(time_limit_s=60.0)
    patient.start()
    busy = patient._processes._idle.queue[-1]
    refusals = []

    def render_for_ever() -> None:
        with pytest.raises(RequestError) as refusal:
            patient.render(FOR_EVER, HELLO, {})
        refusals.append(str(refusal.value))

    slow = threading.Thread(target=render_for_ever)
    slow.start()
    until(lambda: patient._processes._idle.qsize() == 1)
    assert patient.render("quick", HELLO, {}) == "quick"
    assert slow.is_alive()
    assert busy is not None
    busy._process.kill()
    slow.join(60)
    assert "found a process ended by SIGKILL" in refusals[0]


def test_a_stopped_process_is_noticed_and_replaced() -> None:
    renderer = TemplateRenderer(time_limit_s=0.2)
    renderer.render("a", HELLO, {})
    (child,) = _children_of(renderer)
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(RequestError, match=r"within 0\.2 s, found nothing of it"):
        renderer.render("a", HELLO, {})
    assert renderer.render("b", HELLO, {}) == "b"


def test_processes_end_with_their_renderer_and_with_the_program() -> None:
    renderer = TemplateRenderer()
    renderer.start()
    (child,) = _children_of(renderer)
    del renderer
    gc.collect()
    assert not _is_alive(child)
    program = (
        "from dflash_trt.engine_dir.template_renderer import TemplateRenderer as R; import os\n"
        "r = R(); r.render('a', [], {}); print(r._processes._idle.queue[-1]._process.pid, flush=True); os._exit(9)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    until(lambda: not _is_alive(int(ran.stdout)))


def test_a_rendering_takes_milliseconds() -> None:
    PATIENT.render(CHAT_TEMPLATE, HELLO, {})
    started = time.monotonic()
    for _ in range(50):
        PATIENT.render(CHAT_TEMPLATE, HELLO, {})
    assert (time.monotonic() - started) / 50 < 0.05  # 0.0004 s on two shared cores


PATIENT = TemplateRenderer(time_limit_s=30.0)


def _children_of(*renderers: TemplateRenderer) -> set[int]:
    return {
        process._process.pid
        for renderer in renderers
        for process in renderer._processes._idle.queue
        if process is not None
    }


def _is_alive(process_id: int) -> bool:
    path = Path(f"/proc/{process_id}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"
