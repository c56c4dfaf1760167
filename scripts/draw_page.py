"""Pictures of the page of `dflash-trt serve`, taken by Chromium while it serves the demo.

dflash-trt serve build/demo --draft-length 7
python -m scripts.draw_page http://127.0.0.1:8000 docs/figures
"""

import sys
import time
from pathlib import Path

from scripts.browser import DESKTOP, PHONE, Tab, find_chromium, open_tab
from scripts.draw_drafts import NUM_TOKENS, PROMPT

NAMES = {"page_phone.webp": (PHONE, True, 1), "page.webp": (DESKTOP, False, 2)}  # size, whether it is dark, scale
_SETTLED_S = 1.5  # colors of new drafts fade


def draw(tab: Tab, url: str, directory: Path) -> None:
    for name, (size, is_dark, scale) in NAMES.items():
        tab.open(f"{url}/", size, is_dark=is_dark, scale=scale)
        tab.evaluate(f"$('max_tokens').value = {NUM_TOKENS}; $('prompt').focus()")
        tab.type(PROMPT)
        tab.press("Enter", with_ctrl=True)
        tab.wait_for("document.querySelector('footer p') !== null")
        tab.wait_for("$('total-speed').textContent !== '\u2013'")
        time.sleep(_SETTLED_S)
        tab.screenshot(directory / name)


def main() -> int:
    url, directory = sys.argv[1:]
    chromium = find_chromium()
    if chromium is None:
        raise SystemExit("no chromium: apt install chromium")
    with open_tab(chromium) as tab:
        draw(tab, url.rstrip("/"), Path(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
