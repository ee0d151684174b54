"""Open every page of the built site in a headless browser, if one is installed.

Usage: python docs/tools/check_browser.py build/docs/html [--screenshots DIR]

Each page is checked at the widths of a desktop and of a phone: no console message, no script error, no failed
request, no request to another host, a heading and text in the main part, every image drawn, no number separated
from its unit in a table, and no horizontal scrolling. With --screenshots, each page is also saved as PNG, in
light and in dark.
"""

from __future__ import annotations

import argparse
import base64
import sys
from pathlib import Path

from cdp import Tab, browser, find_browser
from check_links import find_pages
from serve import serving

WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
LOOK = """
(async () => {
  const main = document.querySelector('main') || document.body;
  const images = [...document.images];
  images.forEach(image => { image.loading = 'eager'; });
  await Promise.all(images.map(image => image.decode().catch(() => null)));
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
    overflow: document.documentElement.scrollWidth - window.innerWidth,
  };
})()
"""
# Pages that may have little text: indices may be short, and the search page is empty at first.
SHORT = {"genindex.html", "search.html", "py-modindex.html"}


def _event_problems(tab: Tab, base: str) -> list[str]:
    problems = []
    for event in tab.events:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            said = " ".join(str(arg.get("value", arg.get("description", ""))) for arg in params["args"])
            problems.append(f"console {params['type']}: {said}")
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            problems.append(f"script error: {details.get('exception', {}).get('description', details['text'])}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            problems.append(f"console {params['entry']['level']}: {params['entry']['text']}")
        elif method == "Network.responseReceived" and params["response"]["status"] >= 400:
            problems.append(f"status {params['response']['status']}: {params['response']['url']}")
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith((base + "/", "data:", "blob:", "about:")):
                problems.append(f"loads from another host: {url}")
    return problems


def check_page(tab: Tab, base: str, name: str, width: int, height: int) -> list[str]:
    """Open one page at one size; return its problems."""
    mobile = width < 600
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
    tab.send("Emulation.setDeviceMetricsOverride", **metrics)
    tab.events.clear()
    tab.send("Page.navigate", url=f"{base}/{name}")
    tab.wait_for("Page.loadEventFired")
    look = tab.evaluate(LOOK)
    problems = _event_problems(tab, base)
    if name not in SHORT:
        if not look["heading"]:
            problems.append("the main part has no heading")
        if look["text"] < 40:
            problems.append(f"the main part shows {look['text']} characters of text")
    problems += [f"image is not drawn: {source}" for source in look["broken"]]
    if look["split"]:
        problems.append(f"numbers are split over lines: {', '.join(look['split'][:5])}")
    if look["overflow"] > 1:
        problems.append(f"is {look['overflow']} pixels wider than the window")
    return problems


def take_screenshots(tab: Tab, name: str, folder: Path) -> None:
    """Save the open page in light and in dark."""
    for scheme in ("light", "dark"):
        tab.evaluate(f"document.documentElement.dataset.theme = '{scheme}'")
        png = tab.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        target = folder / f"{name.removesuffix('.html').replace('/', '-')}-{scheme}.png"
        target.write_bytes(base64.b64decode(png))


def main(arguments: list[str]) -> int:
    """Check the site named on the command line; return 1 if a page has a problem."""
    parser = argparse.ArgumentParser(description="Open every page of a built site in a headless browser.")
    parser.add_argument("site", type=Path)
    parser.add_argument("--screenshots", type=Path, help="save each page here as PNG")
    options = parser.parse_args(arguments)
    path = find_browser()
    if path is None:
        print("browser: no Chromium or Chrome is installed; the pages were not opened (CHROME may name one).")
        return 0
    if options.screenshots:
        options.screenshots.mkdir(parents=True, exist_ok=True)
    names = [page.relative_to(options.site).as_posix() for page in find_pages(options.site)]
    failed = 0
    with serving(options.site) as base, browser(path) as tab:
        for number, name in enumerate(names, 1):
            problems = []
            for label, (width, height) in WIDTHS.items():
                problems += [f"{label}: {text}" for text in check_page(tab, base, name, width, height)]
                if options.screenshots and label == "desktop":
                    take_screenshots(tab, name, options.screenshots)
            failed += bool(problems)
            print(f"[{number}/{len(names)}] {name}: {'; '.join(problems) or 'ok'}", flush=True)
    print(f"browser: {len(names)} pages opened, {failed} with problems.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
