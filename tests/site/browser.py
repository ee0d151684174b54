"""Open pages of a built site in a headless Chromium and look at them as a reader does.

Each page is loaded once, and looked at in windows of several sizes, in light and in dark: no console message, script
error, failed request or request to another host; a heading and text in the main part; every image drawn, figures large
enough to read; no number separated from its unit in a table; nothing that scrolls sideways but tables, code and figures
in boxes of their own; downloads that exist; copy buttons that have an accessible name and copy.
"""

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

from selenium.common.exceptions import TimeoutException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
POLL = 0.05  # seconds
LOOK = """
const [scheme, done] = arguments;
document.documentElement.dataset.theme = scheme;
(async () => {
  const frame = () => new Promise(requestAnimationFrame);
  await frame().then(frame);  // a new size of the window is laid out
  const main = document.querySelector('main') || document.body;
  const images = [...document.images];
  images.forEach(image => { image.loading = 'eager'; });
  await Promise.all(images.map(image => image.naturalWidth || image.decode().catch(() => null)));
  const shown = image => image.getClientRects().length > 0;
  const lines = cell => {
    const range = document.createRange();
    range.selectNodeContents(cell.querySelector('p') || cell);
    return new Set([...range.getClientRects()].map(box => Math.round(box.bottom))).size;
  };
  const numbers = [...main.querySelectorAll('td.text-right, td[style*="right"]')];
  return {
    heading: (main.querySelector('h1') || {}).innerText || '',
    text: main.innerText.trim().length,
    broken: images.filter(i => shown(i) && !(i.complete && i.naturalWidth > 0)).map(i => i.src),
    split: numbers.filter(cell => lines(cell) > 1).map(cell => cell.innerText.trim()),
    width: document.documentElement.clientWidth,
    wide: [...document.querySelectorAll('html, .bd-article-container, .bd-sidebar-primary, .prev-next-area a')]
      .filter(box => box.scrollWidth > box.clientWidth + 1)
      .map(box => `${box.className || 'page'} (${box.scrollWidth} pixels, not ${box.clientWidth})`),
    cut: [...document.querySelectorAll('.sphx-glr-script-out pre, .highlight-text pre')].filter(
      box => box.scrollWidth > box.clientWidth + 1 && !/^-[- ]*$|\\S {2,}\\S| {3}/m.test(box.textContent)
    ).map(box => box.textContent.slice(0, 40)),
    // Those of the class "wide" have twice the pixels.
    small: images.filter(i => i.closest('figure, .figure-box') && shown(i)
      && i.width < (i.classList.contains('wide') ? 0.5 : 0.59) * i.naturalWidth).map(i => i.src),
  };
})().then(done, error => done({error: String(error)}));
"""
DOWNLOAD = """
const done = arguments[0], files = [...document.querySelectorAll('main a[download]')].map(link => link.href);
Promise.all(files.map(async file => (await fetch(file)).text())).then(
  found => done(files.filter((file, number) => !found[number])), error => done([String(error)]));
"""
# Pages that may have little text: indices may be short, and the search page is empty at first.
SHORT = {"genindex.html", "search.html"}


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""


@contextlib.contextmanager
def serving(site: Path) -> Iterator[str]:
    """Serve `site` in a thread; yield its address without a trailing slash."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def find_browser() -> str | None:
    """Return the path of an installed Chromium or Chrome, None if there is none."""
    return next((path for name in (os.environ.get("CHROME", ""), *NAMES) if (path := shutil.which(name))), None)


@contextlib.contextmanager
def browser(path: str) -> Iterator[Chrome]:
    """Start a headless browser with a new profile; close it afterwards."""
    options = ChromeOptions()
    options.binary_location = path
    for flag in ("headless=new", "disable-gpu", "disable-dev-shm-usage", "disable-background-networking"):
        options.add_argument(f"--{flag}")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # the sandbox does not work as root; only our own pages are opened
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # A driver beside the browser is of its version; Selenium gets one where there is none.
    tab = Chrome(options, ChromeService(shutil.which("chromedriver")))
    try:
        yield tab
    finally:
        tab.quit()


def resize(tab: Chrome, size: tuple[int, int]) -> None:
    """Give the window a size; narrow ones are phones."""
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 600}
    tab.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def open_page(tab: Chrome, url: str, size: tuple[int, int]) -> None:
    """Open a page in a window of a size."""
    resize(tab, size)
    tab.get(url)


def _messages(tab: Chrome, base: str) -> list[str]:
    """Return what the console and the network said since the last call."""
    problems = [f"console {e['level']}: {e['message']}" for e in tab.get_log("browser") if e["level"] != "INFO"]
    for entry in tab.get_log("performance"):
        event = json.loads(entry["message"])["message"]
        if event["method"] == "Network.responseReceived" and (answer := event["params"]["response"])["status"] >= 400:
            problems.append(f"status {answer['status']}: {answer['url']}")
        elif event["method"] == "Network.requestWillBeSent":
            url = event["params"]["request"]["url"]
            if not url.startswith((base + "/", "data:", "blob:", "about:")):
                problems.append(f"loads from another host: {url}")
    return problems


def check_page(tab: Chrome, base: str, name: str, *sizes: tuple[int, int]) -> list[str]:
    """Open one page, and look at it at each size; return its problems, each once."""
    _messages(tab, base)
    open_page(tab, f"{base}/{name}", sizes[0])
    problems = [f"download is empty: {file}" for file in tab.execute_async_script(DOWNLOAD)]
    for size, scheme in product(sizes, ("light", "dark")):
        if scheme == "light" and size != sizes[0]:
            resize(tab, size)
        look = tab.execute_async_script(LOOK, scheme)
        problems += [look["error"]] if "error" in look else _problems(look, name in SHORT)
    return list(dict.fromkeys(problems + _copy_problems(tab) + _messages(tab, base)))


def _problems(look: dict[str, Any], short: bool) -> list[str]:
    problems = [] if look["heading"] or short else ["the main part has no heading"]
    if look["text"] < 40 and not short:
        problems.append(f"the main part shows {look['text']} characters of text")
    problems += [f"image is not drawn: {source}" for source in look["broken"]]
    if look["split"]:
        problems.append(f"numbers are split over lines: {', '.join(look['split'][:5])}")
    problems += [f"is too wide for a window of {look['width']}: {box}" for box in look["wide"]]
    problems += [f"cuts off printed lines in a window of {look['width']}: {text!r}" for text in look["cut"]]
    problems += [f"shows a figure too small in a window of {look['width']}: {source}" for source in look["small"]]
    return problems


def _copy_problems(tab: Chrome) -> list[str]:
    """Press the first copy button; each has a name for a screen reader."""
    buttons = tab.find_elements(By.CSS_SELECTOR, "button.copybtn")
    if any(not button.accessible_name for button in buttons):
        return ["a copy button has no accessible name"]
    if not buttons:
        return []
    tab.execute_script("arguments[0].click()", buttons[0])
    try:
        WebDriverWait(tab, 2, POLL).until(lambda _: "success" in (buttons[0].get_attribute("class") or ""))
    except TimeoutException:
        return ["a copy button does not copy"]
    return []


def first_result(tab: Chrome, base: str, words: str, seconds: float = 20) -> str:
    """Return the page that the search page lists first, without its anchor; empty if there is none in some seconds."""
    open_page(tab, f"{base}/search.html?q={quote(words)}", WIDTHS["desktop"])
    found = (By.CSS_SELECTOR, "#search-results ul.search li a")
    try:
        link = WebDriverWait(tab, seconds, POLL).until(lambda _: tab.find_elements(*found))[0]
    except TimeoutException:
        return ""
    return str(link.get_attribute("href")).removeprefix(f"{base}/").partition("#")[0]


def check_theme(tab: Chrome, base: str) -> list[str]:
    """Choose each mode of the theme switch; return those that do not show."""
    open_page(tab, f"{base}/index.html", WIDTHS["desktop"])
    for mode in ("dark", "light"):
        for button in tab.find_elements(By.CSS_SELECTOR, f"button.theme-change-button[data-mode={mode}]")[:1]:
            tab.execute_script("arguments[0].click()", button)
        if tab.execute_script("return document.documentElement.dataset.theme") != mode:
            return [f"the theme switch does not show the {mode} theme"]
    return []
