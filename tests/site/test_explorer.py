"""The JavaScript of the schedule explorer gives what `simulate` gives: in node, if installed, and in a browser.

`nox -s docs` names the folder of the built site in ACTOFFLOAD_SITE, for the browser.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from actoffload.schedule import DefaultSchedule, LayerCost, Link, simulate

if TYPE_CHECKING:
    from selenium.webdriver.remote.webdriver import WebDriver

ROOT = Path(__file__).parents[2]
SITE = os.environ.get("ACTOFFLOAD_SITE")

PROGRAM = """
const Explorer = require(process.argv[1]);
const settings = JSON.parse(require("fs").readFileSync(0));
const numbers = (s) => { const {spans, resident, ...r} = Explorer.simulate(s); return r; };
process.stdout.write(JSON.stringify(settings.map(numbers)));
"""


NAMES = ("layers", "offloaded", "recomputed", "bytes", "forward", "backward", "link", "fraction", "again")
AXES = (
    (2, 5, 12),
    (0, 1, 4, 10),
    (0, 2, 7),
    (5, 2**28 + 3),
    (0.01,),
    (0.02, 0.005),
    (2e9, 25e9),
    (0.06, 0.5),
    (1.0, 0.2),
)
GRID = [dict(zip(NAMES, values, strict=True)) for values in itertools.product(*AXES)]
GRID = [s for s in GRID if s["offloaded"] < s["layers"] and s["recomputed"] <= s["layers"]]
TICKS = """
const boxes = [...document.querySelectorAll('#explorer text.tick')].map(text => text.getBoundingClientRect());
const over = (a, b) => a.left < b.right && b.left < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom;
return boxes.some((box, k) => boxes.slice(k + 1).some(other => over(box, other)));
"""
SET = """
for (const [name, value] of Object.entries(arguments[0])) {
  document.getElementById(`explorer-${name}`).value = value;
  document.querySelector('#explorer form').dispatchEvent(new Event('input'));
}
return [...document.querySelectorAll('#explorer text.tick')].map(text => text.textContent);
"""
RUN = "return arguments[0].map((s) => { const {spans, resident, ...r} = Explorer.simulate(s); return r; });"


def expected(s: dict[str, Any]) -> dict[str, float]:
    """Return what `simulate` predicts for a setting."""
    kept = int(s["bytes"] * s["fraction"])
    whole = LayerCost.even(s["bytes"], s["forward"], s["backward"])
    again = LayerCost.even(kept, s["forward"], s["backward"] + s["again"] * s["forward"])
    again = replace(again, backward_temporary=s["bytes"] - kept)
    costs = [whole] * (s["layers"] - s["recomputed"]) + [again] * s["recomputed"]
    found = simulate(DefaultSchedule(s["offloaded"], s["layers"]).plan(), costs, Link(s["link"], s["link"]))
    values = {"step": found.step_time, "peak": found.device_peak_bytes, "copied": found.bytes_offloaded}
    values |= {"forwardStall": found.forward_stall, "backwardStall": found.backward_stall}
    return values | {"forwardTime": found.forward_time, "onDemand": found.reloaded_on_demand}


def differences(got: list[dict[str, float]]) -> list[str]:
    """Return a sentence for each value of the JavaScript that is not that of `simulate`."""
    found = []
    for s, result in zip(GRID, got, strict=True):
        for name, value in expected(s).items():
            if abs(result[name] - value) > 1e-9 * max(1e-3, abs(value)):
                found.append(f"explorer: {name} is {result[name]}, simulate says {value}, for {json.dumps(s)}")
    return found


def checks(driver: WebDriver, base: str) -> list[str]:
    """Open the page of the explorer at two widths and in both themes; return its problems."""
    problems = []
    for width, theme in itertools.product((390, 1280), ("light", "dark")):
        driver.set_window_size(width, 900)
        driver.get(f"{base}/explorer.html")
        driver.execute_script(f"document.documentElement.dataset.theme = '{theme}'")
        if width == 1280 and theme == "light":
            problems += differences(driver.execute_script(RUN, GRID))
        over = driver.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
        problems += [f"explorer: {over} pixels wider than a window of {width}"] if over > 1 else []
        inputs = driver.find_elements("css selector", "#explorer input")
        unnamed = [i.get_attribute("id") for i in inputs if not i.accessible_name]
        problems += [f"explorer: no label for {unnamed}"] if unnamed or not inputs else []
        before = driver.find_element("css selector", ".explorer-numbers").text
        driver.execute_script("arguments[0].focus()", inputs[1])
        inputs[1].send_keys("\ue014")  # right arrow: one more layer is offloaded
        if driver.find_element("css selector", ".explorer-numbers").text == before:
            problems.append(f"explorer: the right arrow key changes nothing at {width} pixels")
        ticks = driver.execute_script(SET, {"layers": 32, "offloaded": 31, "forward": 8, "backward": 16.2})
        if driver.execute_script(TICKS):
            problems.append(f"explorer: ticks overlap at {width} pixels: {ticks}")
        if ticks[-2:] != ["500", "1000"]:
            problems.append(f"explorer: ticks are not round: {ticks}")
        if "offloaded" not in driver.find_element("css selector", "#explorer svg").get_attribute("aria-label"):
            problems.append("explorer: the figure has no description")
    return problems


@pytest.fixture(scope="module")
def simulated():
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed; nox -s docs runs the same comparison in a browser")
    command = [node, "-e", PROGRAM, str(ROOT / "docs" / "_static" / "explorer.js")]
    found = subprocess.run(command, input=json.dumps(GRID), capture_output=True, text=True, check=True)
    return json.loads(found.stdout)


def test_javascript_agrees_with_simulate(simulated):
    assert len(GRID) > 500
    assert differences(simulated) == []
    assert {result["forwardStall"] > 0 for result in simulated} == {False, True}
    assert {result["backwardStall"] > 0 for result in simulated} == {False, True}


@pytest.mark.skipif(SITE is None, reason="ACTOFFLOAD_SITE names no built site")
def test_page_in_a_browser(tab):
    from browser import serving

    with serving(Path(SITE)) as base:
        assert checks(tab, base) == []
