"""Debian's Chromium without a screen, driven over its DevTools protocol: for tests of the page and its pictures.

Source: https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

WAIT_S: Final = 60.0
_POLL_S: Final = 0.05
_KEYS: Final = {"Enter": ("\r", 13), "Escape": ("", 27), "Tab": ("", 9)}
_CTRL: Final = 2  # the bit of the protocol

PHONE: Final = (390, 844)
DESKTOP: Final = (1280, 800)


def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")


class Tab:
    """One page. `complaints` has every exception of a script and every message of the browser, as of its policy."""

    def __init__(self, socket: Any) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._numbers = count(1)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a command; events on the way are looked through for complaints."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._hear(message)

    def open(self, url: str, size: tuple[int, int] = DESKTOP, *, is_dark: bool = False, scale: float = 1) -> None:
        width, height = size
        metrics: dict[str, Any] = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression, which may be a promise."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, f"{script}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not self.evaluate(condition):
            assert time.monotonic() < deadline_s, f"{condition}, after {WAIT_S:.0f} s; complaints: {self.complaints}"
            time.sleep(_POLL_S)

    def type(self, text: str) -> None:
        """Into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, with_ctrl: bool = False) -> None:
        text, code = _KEYS[key]
        fields: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        fields["modifiers"] = _CTRL if with_ctrl else 0
        self.call("Input.dispatchKeyEvent", type="keyDown", **fields, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def screenshot(self, path: Path) -> None:
        """A .webp or .png file."""
        name, quality = path.suffix.removeprefix("."), {"quality": 90} if path.suffix == ".webp" else {}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format=name, **quality)["data"]))

    def _hear(self, message: Mapping[str, Any]) -> None:
        parameters = message.get("params", {})
        if message["method"] == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("warning", "error"):
            self.complaints.append(parameters["entry"]["text"])


@contextmanager
def open_tab(chromium: str) -> Iterator[Tab]:
    """A tab of a browser that ends with the block; needs the package websocket-client."""
    import websocket

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        words += ["--hide-scrollbars", "--no-first-run", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        browser = subprocess.Popen([*words, "about:blank"], start_new_session=True, **quiet)
        try:
            socket = websocket.create_connection(_address(browser, Path(profile)), timeout=WAIT_S, suppress_origin=True)
            try:
                yield Tab(socket)
            finally:
                socket.close()
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()


def _address(browser: subprocess.Popen[bytes], profile: Path) -> str:
    """The web socket of the first tab."""
    ports, deadline_s = profile / "DevToolsActivePort", time.monotonic() + WAIT_S
    while not (ports.exists() and ports.read_text()):
        assert browser.poll() is None, f"the browser ended with {browser.returncode}"
        assert time.monotonic() < deadline_s, f"the browser did not start within {WAIT_S:.0f} s"
        time.sleep(_POLL_S)
    port = ports.read_text().split()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=WAIT_S) as answer:
        [page] = [page for page in json.load(answer) if page["type"] == "page"]
    return str(page["webSocketDebuggerUrl"])
