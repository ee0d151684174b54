"""Plans of pipeline ranks as data: their moments, their text and their files."""

import pickle

import pytest

from actoffload.schedule import (
    Chunk,
    ChunkAction,
    Do,
    Moment,
    PipelinePlan,
    Transfer,
    read_order,
)

ORDER = read_order(["0F0", "0F1", "2F0", "2F1", "2I0", "2I1", "0B0", "2W0", "0B1", "2W1"])
NAMES = {0: ("a", "b"), 2: ("c",)}
OLD = Chunk(0, 0, 0)
SPLIT = Chunk(2, 0, 0)
PLAN = PipelinePlan(
    1,
    ORDER,
    NAMES,
    {
        OLD: Transfer(Moment(1, 1), Moment(6, 0)),
        Chunk(0, 1, 0): Transfer(Moment(2, 0), Moment(6, 0)),
        SPLIT: Transfer(Moment(3, 0), Moment(4, 0)),
    },
    {2: True},
    nbytes={0: (2**20, 2**19), 2: (2**21,)},
    saves={2: (("aten.mm.default#0",),)},
    seconds=0.012,
    baseline_seconds=0.010,
    peak_bytes=2**22,
    because="As a test.",
)


def test_host_memory_that_a_plan_needs() -> None:
    """From the forward of each microbatch to its last backward: all three, until the first full backward ends."""
    assert PLAN.offloaded_bytes == PLAN.host_bytes == 2 * 2**20 + 2**21
    one = PipelinePlan(0, ORDER, NAMES, {OLD: PLAN.transfers[OLD]}, nbytes=PLAN.nbytes)
    again = read_order(["0F0", "0B0", "0F1", "0B1"])
    both = {Chunk(0, k, 0): Transfer(Moment(2 * k, 1), Moment(2 * k + 1, 0)) for k in range(2)}
    after = PipelinePlan(0, again, {0: ("a", "b")}, both, nbytes={0: (2**20, 2**19)})
    assert one.host_bytes == after.host_bytes == 2**20
    assert PipelinePlan(0, ORDER, NAMES).host_bytes == 0


def test_actions_by_moment_and_in_order() -> None:
    offload, release, reload = Do.OFFLOAD, Do.RELEASE, Do.RELOAD
    assert PLAN.actions == {
        Moment(0, 0): (ChunkAction(offload, OLD),),
        Moment(1, 0): (ChunkAction(offload, Chunk(0, 1, 0)),),
        Moment(1, 1): (ChunkAction(release, OLD),),
        Moment(2, 0): (ChunkAction(release, Chunk(0, 1, 0)), ChunkAction(offload, SPLIT)),
        Moment(3, 0): (ChunkAction(release, SPLIT),),
        Moment(4, 0): (ChunkAction(reload, SPLIT),),
        Moment(6, 0): (ChunkAction(reload, OLD), ChunkAction(reload, Chunk(0, 1, 0))),
    }
    assert PLAN.at(Moment(4, 0)) == (ChunkAction(reload, SPLIT),)
    assert PLAN.at(Moment(5, 0)) == PLAN.at(Moment(6, 2)) == ()
    assert str(PLAN.at(Moment(4, 0))[0]) == "reload group 0 of stage 2, microbatch 0"


def test_positions_are_in_the_order_of_execution() -> None:
    assert (PLAN.position(0, 1), PLAN.position(6, 1), PLAN.end(6)) == (Moment(0, 1), Moment(6, 0), Moment(6, 2))
    assert (PLAN.first_use(OLD), PLAN.first_use(SPLIT)) == (Moment(6, 1), Moment(4, 0))
    assert PLAN.uses(2, 1) == (3, 5, 9)
    # The input backward of a stage without a split uses nothing.
    whole = PipelinePlan(0, read_order(["0F0", "0I0", "0W0"]), {0: ("a", "b")})
    assert (whole.uses(0, 0), whole.first_use(Chunk(0, 0, 0))) == ((0, 2, 2), Moment(2, 1))
    assert PLAN.offloaded_bytes == 2**20 * 2 + 2**21


def test_text_and_copies() -> None:
    lines = str(PLAN).splitlines()
    assert lines[0] == "rank 1"
    assert lines[3].split() == ["0", "a", "2", "of", "2", "-", "2.0", "MiB", "-"]
    assert lines[5].split() == ["2", "c", "1", "of", "2", "2.0", "MiB", "2.0", "MiB", "yes"]
    assert lines[-1] == "Expected: peak 4.0 MiB; step 12.00 ms, 10.00 ms without offloading. As a test."
    assert pickle.loads(pickle.dumps(PLAN)) == PLAN


@pytest.mark.parametrize(
    ("chunk", "transfer", "problem"),
    [
        (Chunk(1, 0, 0), Transfer(Moment(1, 0), Moment(4, 0)), "this rank does not compute that"),
        (Chunk(0, 2, 0), Transfer(Moment(1, 0), Moment(4, 0)), "this rank does not compute that"),
        (Chunk(0, 0, 2), Transfer(Moment(1, 0), Moment(4, 0)), "this rank does not compute that"),
        (OLD, Transfer(Moment(0, 0), Moment(4, 0)), "frees it before its forward has ended"),
        (OLD, Transfer(Moment(4, 0), Moment(3, 0)), "reloads it before it is freed, or after it is used"),
        (OLD, Transfer(Moment(1, 0), Moment(6, 2)), "reloads it before it is freed, or after it is used"),
        (OLD, Transfer(Moment(1, 0), Moment(4, 2)), "2I0 has no position 2"),
        (SPLIT, Transfer(Moment(3, 0), Moment(6, 0)), "reloads it before it is freed, or after it is used"),
    ],
)
def test_transfers_that_cannot_be(chunk: Chunk, transfer: Transfer, problem: str) -> None:
    with pytest.raises(ValueError, match=f"The plan offloads {chunk}, but .*{problem}"):
        PipelinePlan(0, ORDER, NAMES, {chunk: transfer}, {2: True})


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (["0F0", "0F0", "0B0"], "has the step 0F0 twice"),
        (["0B0"], "has the step 0B0 without a forward of that microbatch"),
        (["0F0"], "After the step 0F0 the order needs one full backward"),
        (["0F0", "0W0", "0I0"], "After the step 0F0 the order needs one full backward"),
        (["1F0", "1B0"], "has steps of stage 1, but names has no groups of that stage"),
    ],
)
def test_orders_that_cannot_be(order: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        PipelinePlan(0, read_order(order), {0: ("a",)})
