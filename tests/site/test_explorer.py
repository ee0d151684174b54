"""The JavaScript of the schedule explorer gives what `simulate` gives: in node, if installed, and in a browser.

`nox -s docs` names the folder of the built site in ACTOFFLOAD_SITE, for the browser.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import explorer_checks
import pytest

ROOT = Path(__file__).parents[2]
SITE = os.environ.get("ACTOFFLOAD_SITE")

PROGRAM = """
const Explorer = require(process.argv[1]);
const settings = JSON.parse(require("fs").readFileSync(0));
const numbers = (s) => { const {spans, resident, ...r} = Explorer.simulate(s); return r; };
process.stdout.write(JSON.stringify(settings.map(numbers)));
"""


@pytest.fixture(scope="module")
def simulated():
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed; nox -s docs runs the same comparison in a browser")
    command = [node, "-e", PROGRAM, str(ROOT / "docs" / "_static" / "explorer.js")]
    found = subprocess.run(command, input=json.dumps(explorer_checks.GRID), capture_output=True, text=True, check=True)
    return json.loads(found.stdout)


def test_javascript_agrees_with_simulate(simulated):
    assert len(explorer_checks.GRID) > 500
    assert explorer_checks.differences(simulated) == []
    assert {result["forwardStall"] > 0 for result in simulated} == {False, True}
    assert {result["backwardStall"] > 0 for result in simulated} == {False, True}


def test_a_difference_is_named(simulated):
    simulated = [dict(result) for result in simulated]
    simulated[3]["peak"] += 1
    (sentence,) = explorer_checks.differences(simulated)
    assert sentence.startswith("explorer: peak is ")


@pytest.mark.skipif(SITE is None, reason="ACTOFFLOAD_SITE names no built site")
def test_page_in_a_browser(tab):
    from browser import serving

    with serving(Path(SITE)) as base:
        assert explorer_checks.checks(tab, base) == []
