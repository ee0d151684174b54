"""Messages between ranks are plain data: what they say is exact, and reading one runs nothing."""

import json
import math
import os
import pickle
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from actoffload._text import UnreadableError, read, written
from actoffload.pipeline.first_steps import RankCosts
from actoffload.planner import Variant
from actoffload.schedule import DefaultSchedule, LayerCost, Link, Plan, Saved
from actoffload.schedule.costs import StageCost
from actoffload.schedule.orders import Computation, Step
from actoffload.tune.exchange import Exchange, LostRankError, Settings
from actoffload.tune.findings import Findings, Room
from actoffload.tune.meter import Peak, Shown

COST = LayerCost(0.1, 1 / 3, (Saved(2**70, 0.25), Saved(1)), host_forward=5e-324, other_bytes=(1, 2, 3, 4))
LINK = Link(25.6 * 2**30, 1e9, both=1.1)
VARIANT = Variant(COST, ("aten.mm.default#0",))
PLAN = Plan(
    3,
    DefaultSchedule(1, 3).plan().steps,
    ("a", "b", "c"),
    (1, 2, 3),
    seconds=0.3,
    peak_bytes=7,
    because="µ",
    saves=(None, ("x",), None),
)

EXAMPLES = [
    None,
    True,
    2**200,
    -0.0,
    math.inf,
    "a\x00µ",
    (1, [2, (3,)], {"a": (None,), 1: {(2, 3): []}}),
    {frozenset({1, 2}): {3}},
    (Step(0, Computation.BACKWARD_WEIGHT, 2),),
    (Room(7, Peak(5), Link(2.0, 3.0)), Findings(plan=PLAN, bare=Peak(1, 2, 3), pace=0.3)),
    (None, Findings(names=("a", "b"), ways=[(VARIANT,), (VARIANT, VARIANT)], link=LINK, host_limit=0)),
    Room(None, Peak(5)),
    Settings({"fraction": None, "memory_budget": "1GiB"}, "", {"x": "y"}, 1),
    RankCosts(
        Plan.of_rank(1, (Step(0, Computation.FORWARD, 0),), {0: ("a", "b")}),
        {0: StageCost((COST, COST), 1, 2, 3, 6, split=True)},
        LINK,
        ways={0: [(VARIANT,), (VARIANT, VARIANT)]},
    ),
    Shown(0.1 + 0.2, 7, refused=True),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_is_read_as_it_was_written(message: Any):
    found = read(written(message))
    assert found == message
    assert repr(found) == repr(message)  # also the types of all that is inside


@given(st.floats())
def test_floats_keep_all_bits(number: float):
    found = read(written(number))
    assert math.isnan(number) if math.isnan(found) else struct.pack("d", found) == struct.pack("d", number)


@pytest.mark.parametrize(
    "message",
    [object(), partial(os.system, "true"), Path("x"), {"a": (b"x",)}],
    ids=["object", "function", "path", "bytes"],
)
def test_what_is_no_data_is_not_written(message: object):
    with pytest.raises(TypeError, match="is not registered for messages"):
        written(message)


class Hostile:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_hostile_message_runs_nothing(tmp_path: Path):
    path = tmp_path / "made"
    for data in (
        pickle.dumps(Hostile(path)),
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"os.mkdir": {"path": "x"}}',
        b'{"tuple": [1], "list": []}',
        b'{"Room": {"limit": 1, "more": 2}}',
        b'{"Computation": "__class__"}',
        b'{"Plan": {"model_layers": -1}}',
        json.dumps({"partial": ["os.mkdir", {"tuple": [str(path)]}, {"dict": []}]}).encode(),
        json.dumps({"dict": [[{"dict": []}, 1]]}).encode(),
    ):
        with pytest.raises(UnreadableError):
            read(data)
        store = dist.HashStore()
        store.set("model/1", data)
        with pytest.raises(LostRankError, match="A message in the store of the process group cannot be read"):
            Exchange("model", 1, (0, 1), lambda store=store: store).gather(None, "")
        assert not path.exists()
