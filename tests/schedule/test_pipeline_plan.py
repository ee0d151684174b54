"""Plans of the ranks of pipelines: what they refuse, their events, their text and their files."""

import re
from itertools import chain

import pytest
from plan_calls import transfer

from actoffload.schedule import Action, Do, Event, Plan, When, read_order

ORDER = read_order(["0F0", "0F1", "2F0", "2F1", "2I0", "2I1", "0B0", "2W0", "0B1", "2W1"])
RANK = {"rank": 1, "order": ORDER, "stages": (0, 0, 2), "splits": (2,), "names": ("a", "b", "c")}
FREED, USED = Event(When.FORWARD_START, 1, 1), Event(When.BACKWARD_START, 1)
OLD = transfer(0, 0, FREED, USED)
SPLIT = transfer(2, 0, Event(When.FORWARD_START, 2, 1), Event(When.INPUT_START, 2))
PLAN = Plan.of(
    3,
    [*OLD, *transfer(0, 1, Event(When.FORWARD_START, 2), USED), *SPLIT],
    nbytes=(2**20, 2**19, 2**21),
    saves=(None, None, ("aten.mm.default#0",)),
    seconds=0.012,
    baseline_seconds=0.010,
    peak_bytes=2**22,
    because="As a test.",
    **RANK,
)


def test_host_memory_that_a_plan_needs() -> None:
    """From the forward of each microbatch to its last backward: all three, until the first full backward ends."""
    assert PLAN.offloaded == (0, 0, 2)
    assert PLAN.offloaded_bytes == PLAN.host_bytes == 2 * 2**20 + 2**21
    assert PLAN.kept_bytes == 2 * 2**19 + 2**21
    order = read_order(["0F0", "0B0", "0F1", "0B1"])
    events = ((k, Event(When.FORWARD_START, 1, k), Event(When.BACKWARD_START, 1, k)) for k in range(2))
    calls = chain.from_iterable(transfer(0, *each) for each in events)
    after = Plan.of(2, calls, nbytes=(2**20, 2**19), rank=0, order=order, stages=(0, 0))
    assert (after.offloaded_bytes, after.host_bytes) == (2 * 2**20, 2**20)
    assert Plan(3, **RANK).host_bytes == 0


def test_events_are_in_the_order_of_execution() -> None:
    forward, backward = PLAN.events_of(ORDER[1]), PLAN.events_of(ORDER[6])
    assert [str(event) for event in forward] == [
        "forward start of layer 0, microbatch 1",
        "forward start of layer 1, microbatch 1",
        "forward end of layer 1, microbatch 1",
    ]
    starts, end = [Event(When.BACKWARD_START, k) for k in (1, 0)], Event(When.BACKWARD_END, 0)
    assert list(backward) == [*starts, end]
    assert PLAN.at(*USED) == (Action(Do.RELOAD, 0), Action(Do.RELOAD, 0, 1))
    assert (PLAN.first_use(0), PLAN.first_use(2)) == (Event(When.BACKWARD_START, 0), Event(When.INPUT_START, 2))
    # The input backward of a stage without a split uses nothing.
    whole = Plan(2, rank=0, order=read_order(["0F0", "0I0", "0W0"]), stages=(0, 0))
    assert whole.first_use(0) == Event(When.WEIGHT_START, 0)


def test_text_and_files(tmp_path) -> None:
    lines = str(PLAN).splitlines()
    assert lines[0] == "rank 1"
    assert lines[3].split() == ["0", "a", "2", "of", "2", "-", "2.0", "MiB", "-"]
    assert lines[5].split() == ["2", "c", "1", "of", "2", "2.0", "MiB", "2.0", "MiB", "yes"]
    beside = "10.00 ms estimated without offloading and recomputing"
    assert lines[-1] == f"Expected: peak 4.0 MiB; step 12.00 ms, {beside}. As a test."
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN


@pytest.mark.parametrize(
    ("calls", "problem"),
    [
        (transfer(3, 0, FREED, USED), "names the forward start of layer 3, which is not in its order"),
        (transfer(0, 2, FREED, USED), "names the forward start of layer 0, microbatch 2, which is not in its order"),
        (
            transfer(0, 0, Event(When.FORWARD_END, 0), USED),
            "names the forward end of layer 0, which is not in its order",
        ),
        (transfer(0, 0, Event(When.FORWARD_START, 0), USED), "would release layer 0 before its forward ends"),
        (transfer(0, 0, USED, FREED), "would reload layer 0 without, or before, the action 'release layer 0'"),
        (transfer(0, 0, FREED, Event(When.BACKWARD_END, 0)), "would reload layer 0 after its backward starts"),
        (transfer(2, 0, Event(When.FORWARD_START, 2, 1), USED), "would reload layer 2 after its backward starts"),
    ],
)
def test_plans_that_cannot_be(calls: list[tuple[Event, Action]], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"The plan {problem}")):
        Plan.of(3, calls, **RANK)


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (["0F0", "0F0", "0B0"], "has the step 0F0 twice"),
        (["0B0"], "has the step 0B0 without a forward of that microbatch"),
        (["0F0"], "After the step 0F0 the order needs one full backward"),
        (["0F0", "0W0", "0I0"], "After the step 0F0 the order needs one full backward"),
    ],
)
def test_orders_that_cannot_be(order: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        _ = Plan(1, rank=0, order=read_order(order), stages=(0,)).uses
