"""The gateway's page: what is sent, and how it behaves in a real browser before a real server."""

import asyncio
import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs the extra 'serve'")

from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from dflash_trt.core.request import SamplingParams
from dflash_trt.servers.dynamo import page
from dflash_trt.servers.dynamo.gateway import Gateway, make_app, open_gateway
from dflash_trt.servers.dynamo.settings import PageSettings, is_chat_model
from dflash_trt.serving.llm import LLM
from dflash_trt.serving.marked_texts import marked_texts
from scripts.browser import DESKTOP, PHONE, Tab, find_chromium, open_tab
from scripts.draw_page import NAMES, draw
from tests.servers.dynamo.serving import Server, free_ports, serving
from tests.servers.dynamo.test_gateway import settings

FILE = Path(page.__file__).with_name("page.html").read_text()
SERVER = PageSettings(
    model='a"b</script><i>', has_chat_template=True, is_chat_model=False, has_drafter=True, reports_drafts=True
)


class Elements(HTMLParser):
    """The names and attributes of all elements, and the contents of script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.contents: dict[str, str] = {}
        self._name = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._name = tag

    def handle_data(self, data: str) -> None:
        if self._name in ("script", "style"):
            self.contents.setdefault(self._name, data)


def asked(method: str, path: str, shown: PageSettings | None) -> tuple[int, dict[str, str], str]:
    async def run() -> tuple[int, dict[str, str], str]:
        gateway = Gateway(settings("http://127.0.0.1:9").model_copy(update={"page": shown}), limit=5)
        async with TestServer(make_app(gateway)) as server, ClientSession() as session:
            answer = await session.request(method, server.make_url(path))
            return answer.status, dict(answer.headers), await answer.text()

    return asyncio.run(run())


def test_the_policy_lets_the_pages_own_script_and_style_run_and_nothing_else() -> None:
    status, headers, text = asked("GET", "/", SERVER)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    elements = Elements(text)
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(elements.contents[name].encode()).digest()).decode()
        assert policy[f"{name}-src"] == f"'sha256-{digest}'"
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    assert {policy[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert "unsafe" not in headers["Content-Security-Policy"] and "http" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
    assert sum(name in ("script", "style") for name, _ in elements.found) == 2
    assert not any(key == "style" or key.startswith("on") for _, given in elements.found for key in given)


def test_the_page_knows_its_server_whatever_the_models_name() -> None:
    body = next(given for name, given in Elements(asked("GET", "/", SERVER)[2]).found if name == "body")
    assert json.loads(body["data-server"] or "") == SERVER.model_dump()


def test_the_page_asks_nothing_of_other_servers_and_makes_no_markup_of_texts() -> None:
    links = set(re.findall(r"https?://[^\s\"'`]+", FILE))
    assert links == {"http://www.w3.org/2000/svg"}
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage", "import "):
        assert name not in FILE.replace("from openai import OpenAI", ""), name


def test_without_the_page_its_path_is_as_any_other() -> None:
    status, _, text = asked("GET", "/", None)
    assert (status, json.loads(text)["error"]["code"]) == (404, 404)
    assert asked("POST", "/", SERVER)[0] == 405


def test_a_base_model_with_a_chat_template_is_no_chat_model(tmp_path: Path) -> None:
    from tests.servers.dynamo.conftest import DEMO

    card = tmp_path / "card"
    shutil.copytree(DEMO / "target", card)
    assert not is_chat_model(card, [0])  # <|endoftext|>
    end_of_turn = json.loads((card / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in end_of_turn}
    assert is_chat_model(card, [0, ids["<|im_end|>"]])
    (card / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ eos_token }}")
    assert is_chat_model(card, [0])
    (card / "chat_template.jinja").unlink()
    assert not is_chat_model(card, [0])


# In the browser

PROMPT = "def fibonacci(n):\n"
TARGETS = "[...document.querySelectorAll('article:last-of-type .text > span')]"
IS_DONE = "running === null && document.querySelector('article:last-of-type footer p') !== null"


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("needs chromium, as of Debian's package of that name")
    pytest.importorskip("websocket", reason="needs the package websocket-client")
    with open_tab(chromium) as opened:
        yield opened


def ask(tab: Tab, prompt: str, *, chat: bool = False, **values: Any) -> None:
    """Fill in the form with the keyboard, and wait for the end of the answer."""
    start(tab, prompt, chat=chat, **values)
    tab.wait_for(IS_DONE)


def start(tab: Tab, prompt: str, *, chat: bool = False, **values: Any) -> None:
    tab.evaluate(f"$('mode-{'chat' if chat else 'text'}').click()")
    for name, value in ({"temperature": 0, "max_tokens": 40} | values).items():
        tab.evaluate(f"$({name!r}).value = {json.dumps(str(value))}; $({name!r}).dispatchEvent(new Event('change'))")
    tab.evaluate("$('prompt').focus()")
    tab.type(prompt)
    tab.press("Enter", with_ctrl=not chat)


def code(tab: Tab, name: str) -> str:
    """The last request as a command, from its dialog."""
    tab.evaluate(f"[...document.querySelectorAll('footer button')].findLast((b) => b.textContent === {name!r}).click()")
    text: str = tab.evaluate("$('code-text').value")
    tab.press("Escape")
    tab.wait_for("!$('code').open")
    return text


def test_a_text_is_shown_by_where_its_tokens_come_from(server: Server, tab: Tab, offline: LLM) -> None:
    tab.open(server.url)
    ask(tab, PROMPT)
    output = offline.generate(PROMPT, SamplingParams(max_new_tokens=40), reports_drafts=True)
    assert offline.codec is not None
    expected = [[text.origin, text.shown] for text in marked_texts(output, offline.codec)]
    assert {origin for origin, _ in expected} == {"accepted", "rejected", "target"}
    assert tab.evaluate(f"{TARGETS}.map((span) => [span.className, span.textContent])") == [
        ["prompt", PROMPT],
        *expected,
    ]
    assert tab.evaluate("$('length').textContent") == f"{output.acceptance_length:.2f}"
    assert tab.evaluate("$('drafts').textContent") == "7"
    accepted = [step.num_accepted for step in output.steps if step.num_candidates]
    strip = tab.evaluate("document.querySelector('.steps').getAttribute('aria-label')")
    assert strip == f"Drafts accepted in each step: {', '.join(map(str, accepted))}"
    assert tab.evaluate("Number($('speed').textContent) > 0")
    tab.evaluate("$('show-rejected').click()")
    assert tab.evaluate("document.querySelector('.text').innerText") == PROMPT + (output.text or "")
    assert tab.complaints == []


def test_a_baseline_answers_beside_the_drafter(demo: Path, tmp_path: Path, tab: Tab, offline: LLM) -> None:
    with serving(demo, tmp_path, "--baseline-replica", "--draft-length", "7", num_replicas=1) as server:
        tab.open(server.url)
        assert not tab.evaluate("$('compare-label').hidden")
        tab.evaluate("$('compare').click()")
        ask(tab, PROMPT)
        main, plain = tab.evaluate(
            "[...document.querySelectorAll('.pair article')].map((one) => [one.querySelector('h3').textContent, "
            "[...one.querySelectorAll('.text > span:not(.rejected)')].map((span) => span.textContent).join('')])"
        )
        text = PROMPT + (offline.generate(PROMPT, SamplingParams(max_new_tokens=40)).text or "")
        assert (main, plain) == (["With the drafter", text], ["Without", text])
        assert tab.evaluate("document.querySelectorAll('.baseline .accepted, .baseline .rejected').length") == 0
        assert re.match(r"\d+\.\d\d times as fast", tab.evaluate("document.querySelector('footer p').textContent"))
        assert server.metric("dflash_trt:draft_tokens_total", 1) in (None, 0.0)
        tab.evaluate("$('compare').click()")
        ask(tab, PROMPT)
        assert tab.evaluate("document.querySelectorAll('.pair').length") == 1
        assert tab.complaints == []
        tab.call("Page.navigate", url="about:blank")  # nothing asks a server that is gone


def test_the_servers_numbers_are_live(server: Server, tab: Tab) -> None:
    tab.open(server.url)
    tab.wait_for("$('running').textContent === '0' && $('waiting').textContent === '0'")
    server.post("completions", prompt=PROMPT, max_tokens=200)
    tab.wait_for("Number($('total-speed').textContent) > 0")


def test_a_conversation_goes_on_and_its_texts_are_no_markup(server: Server, tab: Tab, offline: LLM) -> None:
    tab.open(server.url)
    evil = "<img src=x onerror=alert(1)>"
    ask(tab, evil, chat=True)
    ask(tab, "again", chat=True, system="Be kind.")
    assert tab.evaluate("document.querySelector('.said').textContent") == evil
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
    messages: list[Any] = [{"role": "user", "content": evil}]
    first = offline.chat(messages, SamplingParams(max_new_tokens=40)).text
    messages = [{"role": "system", "content": "Be kind."}, *messages, {"role": "assistant", "content": first}]
    second = offline.chat([*messages, {"role": "user", "content": "again"}], SamplingParams(max_new_tokens=40)).text
    shown = f"{TARGETS}.filter((span) => span.className !== 'rejected').map((span) => span.textContent).join('')"
    assert tab.evaluate(shown) == second
    tab.evaluate("$('new').click()")
    assert tab.evaluate("[messages.length, document.querySelectorAll('article').length]") == [0, 0]
    assert tab.complaints == []


def test_a_new_conversation_forgets_an_answer_that_runs(server: Server, tab: Tab) -> None:
    tab.open(server.url)
    start(tab, "import os", chat=True, max_tokens=1500)
    tab.wait_for(f"{TARGETS}.length > 3")
    tab.evaluate("$('new').click()")
    tab.wait_for("running === null")
    assert tab.evaluate("[messages.length, document.querySelectorAll('article').length]") == [0, 0]
    assert not tab.evaluate("$('empty').hidden")


def test_a_request_can_be_sent_again_with_curl_and_from_python(server: Server, tab: Tab, offline: LLM) -> None:
    tab.open(server.url)
    prompt = "s = 'it''s' # \u00e9 \\n"
    for chat, schema in ((False, None), (True, None), (False, {"type": "boolean"}), (True, {"enum": ["it's", None]})):
        ask(tab, prompt, chat=chat, schema="" if schema is None else json.dumps(schema), top_p=0.9, seed=3)
        script = subprocess.run([sys.executable, "-c", code(tab, "Python")], capture_output=True, text=True, check=True)
        expected = tab.evaluate(f"{TARGETS}.filter((s) => !['rejected', 'prompt'].includes(s.className))"
                                ".map((span) => span.textContent).join('')")  # fmt: skip
        assert script.stdout == expected != ""
        tab.evaluate("$('new').click()")
        if shutil.which("curl"):
            words = ["bash", "-c", code_of_curl(tab, prompt, chat=chat)]
            lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\n\n")
            choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
            assert "".join(c["delta"].get("content") or "" if chat else c["text"] for c in choices) == expected


def code_of_curl(tab: Tab, prompt: str, *, chat: bool) -> str:
    start(tab, prompt, chat=chat, top_p=0.9, seed=3)
    tab.wait_for(IS_DONE)
    return code(tab, "curl")


def test_escape_stops_an_answer(server: Server, tab: Tab) -> None:
    tab.open(server.url)
    start(tab, PROMPT, max_tokens=2000)
    tab.wait_for(f"{TARGETS}.length > 3")
    tab.press("Escape")
    tab.wait_for(IS_DONE)
    assert "stopped" in tab.evaluate("document.querySelector('footer').textContent")
    server.wait_until(lambda: server.total("dflash_trt:requests_running") == 0)


def test_errors_are_announced_and_fields_are_checked_before_a_request(server: Server, tab: Tab) -> None:
    tab.open(server.url)
    start(tab, PROMPT, schema="{")
    assert tab.evaluate("$('schema-error').textContent").startswith("Not JSON: ")
    assert tab.evaluate("document.activeElement.id") == "schema"
    assert tab.evaluate("document.querySelectorAll('article').length") == 0
    ask(tab, "", schema='{"$ref": "#/none"}')
    alert = tab.evaluate("document.querySelector('[role=alert]').textContent")
    assert "json_schema" in alert
    tab.evaluate("$('schema').value = ''")
    tab.complaints.clear()  # the browser's own line about a status of 400


def test_a_key_is_asked_for_when_it_is_needed_and_forgotten_with_the_tab(server: Server, tab: Tab) -> None:
    tab.open(server.url)
    assert tab.evaluate("$('key-label').hidden")
    tab.evaluate(
        "sent = []; fetch = async (url, options) => { sent.push(options.headers);"
        ' return new Response(\'{"error": {"message": "who are you?"}}\', {status: 401}); }; 0'
    )
    ask(tab, PROMPT)
    assert tab.evaluate("document.querySelector('[role=alert]').textContent") == "who are you?"
    assert not tab.evaluate("$('key-label').hidden")
    ask(tab, PROMPT, key="secret")
    assert tab.evaluate("sent.at(-1).Authorization") == "Bearer secret"
    assert tab.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    assert "secret" not in code(tab, "curl") + code(tab, "Python")
    tab.evaluate("sessionStorage.clear()")


@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("width", [320, PHONE[0], 800, DESKTOP[0], 1920])
def test_the_page_fits_every_width_and_its_texts_can_be_read(
    server: Server, tab: Tab, width: int, is_dark: bool
) -> None:
    tab.open(server.url, (width, 800), is_dark=is_dark)
    ask(tab, PROMPT)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth && scrollY === 0")
    assert tab.evaluate("document.getElementById('go').getBoundingClientRect().bottom <= innerHeight")
    for selector in ("body", ".prompt", ".text .accepted", ".hint", "dt"):
        assert tab.evaluate(f"({CONTRAST})({selector!r})") >= 4.5, selector


# WCAG 2.2, contrast of a text's color with that of the nearest element with a background.
CONTRAST = """(selector) => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const found = document.querySelector(selector);
  let behind = found;
  while (channels(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const [a, b] = [getComputedStyle(found).color, getComputedStyle(behind).backgroundColor].map(channels).map(luminance);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""


def test_every_control_has_a_name_and_the_keyboard_reaches_it(server: Server, tab: Tab) -> None:
    tab.open(server.url)
    ask(tab, PROMPT)
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    controls = [node for node in nodes if node.get("role", {}).get("value") in
                ("button", "textbox", "spinbutton", "checkbox", "radio", "log", "image")]  # fmt: skip
    names = [node["name"]["value"] for node in controls]
    assert {"Send", "Prompt", "Temperature", "curl", "Texts"} <= set(names) and all(names)
    tab.evaluate("document.activeElement.blur()")
    seen = set()
    for _ in range(30):
        tab.press("Tab")
        seen.add(tab.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert {"Skip to the prompt", "new", "show-drafts", "temperature", "schema", "log", "curl", "prompt", "go"} <= seen


@contextmanager
def gateway_without_front_end(shown: PageSettings) -> Iterator[str]:
    """Its URL."""
    port, is_up = free_ports(1), threading.Event()
    loop, stopped = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        own = settings("http://127.0.0.1:9", port=port).model_copy(update={"page": shown})
        async with open_gateway(own, limit=20):
            is_up.set()
            await stopped.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert is_up.wait(10)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
        loop.close()


def test_without_a_drafter_the_page_is_silent_about_drafts_and_a_dead_front_end_is_told(tab: Tab) -> None:
    shown = SERVER.model_copy(update={"has_drafter": False, "has_chat_template": False})
    with gateway_without_front_end(shown) as url:
        tab.open(url)
        assert "draft" not in tab.evaluate("document.body.innerText")
        assert tab.evaluate("$('mode-chat').disabled && $('mode-text').checked")
        assert tab.evaluate("[$('model').textContent, document.title]") == [
            SERVER.model,
            f"{SERVER.model} \u00b7 dflash-trt",
        ]
        ask(tab, PROMPT)
        assert "front end is being started again" in tab.evaluate("document.querySelector('[role=alert]').textContent")
        assert tab.evaluate("$('running').textContent") == "\u2013"
        tab.open("about:blank#left")
    tab.complaints.clear()  # the browser's own lines about a status of 503


def test_a_backend_that_does_not_report_drafts_is_not_asked_for_them(server: Server, tab: Tab) -> None:
    tab.open(server.url)
    tab.evaluate(
        "SERVER.reports_drafts = false; real = fetch; fetch = (url, o) => { asked = o.body; return real(url, o); }; 0"
    )
    ask(tab, PROMPT)
    assert "reports_drafts" not in tab.evaluate("asked")
    assert set(tab.evaluate(f"{TARGETS}.map((span) => span.className)")) == {"prompt", "plain"}


def test_a_text_that_a_parser_of_the_server_took_apart_is_shown_as_it_was_received(server: Server, tab: Tab) -> None:
    tab.open(server.url)
    drafts = {"num_draft_tokens": 3, "num_accepted_tokens": 1, "num_tokens": 2,
              "texts": [{"origin": "accepted", "text": "<tool>"}, {"origin": "target", "text": "b"}]}  # fmt: skip
    event = f"data: {json.dumps({'choices': [{'text': 'b'}], 'drafts': drafts})}\n\ndata: [DONE]\n\n"
    tab.evaluate(f"fetch = async () => new Response({json.dumps(event)}); 0")
    ask(tab, PROMPT)
    assert tab.evaluate(f"{TARGETS}.map((span) => span.textContent)") == [PROMPT, "b"]


def test_pictures_for_the_documentation_are_taken(server: Server, tab: Tab, tmp_path: Path) -> None:
    draw(tab, server.url, tmp_path)
    for name in NAMES:
        assert (tmp_path / name).read_bytes()[8:12] == b"WEBP"
