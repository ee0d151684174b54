"""The JavaScript of the schedule explorer gives what `simulate` gives, where node is installed to run it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "tools"))
check_explorer = pytest.importorskip("check_explorer")

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
    found = subprocess.run(command, input=json.dumps(check_explorer.GRID), capture_output=True, text=True, check=True)
    return json.loads(found.stdout)


def test_javascript_agrees_with_simulate(simulated):
    assert len(check_explorer.GRID) > 500
    assert check_explorer.differences(simulated) == []
    assert {result["forwardStall"] > 0 for result in simulated} == {False, True}
    assert {result["backwardStall"] > 0 for result in simulated} == {False, True}


def test_a_difference_is_named(simulated):
    simulated = [dict(result) for result in simulated]
    simulated[3]["peak"] += 1
    (sentence,) = check_explorer.differences(simulated)
    assert sentence.startswith("explorer: peak is ")
