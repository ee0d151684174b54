"""`simulate` against a second, slower model of a device: three queues of work, moved on tick by tick.

Here no time is computed.  The host program is written into three queues, and at every tick each queue does
one unit of work or waits for a signal of another.  Times in these tests are whole ticks, so both must agree
to the last bit.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from adversary.plans import group_plans, plans
from hypothesis import given, settings
from hypothesis import strategies as st

from actoffload.schedule.costs import LayerCost, Link, Saved
from actoffload.schedule.plan import Action, Do, Event, Plan, When
from actoffload.schedule.simulate import simulate
from actoffload.schedule.timeline import Kind

QUARTER = 0.25


@dataclass
class Queue:
    """Work in order: ("wait", key), ("signal", key), ("work", ticks, kind, layer), ("bytes", change)."""

    work: deque[list] = field(default_factory=deque)
    busy: list[tuple[str, int, int]] = field(default_factory=list)
    resident: list[tuple[int, int]] = field(default_factory=list)

    def put(self, *item: object) -> None:
        self.work.append(list(item))

    def settle(self, now: int, signals: set[Hashable]) -> bool:
        """Do everything that takes no time; return whether anything was done."""
        done = False
        while self.work:
            what, value = self.work[0][:2]
            if (what == "wait" and value not in signals) or (what == "work" and value > 0):
                break
            if what == "signal":
                signals.add(value)
            if what == "bytes":
                before = self.resident[-1][1] if self.resident else 0
                self.resident.append((now, before + value))
            self.work.popleft()
            done = True
        return done

    def tick(self, now: int) -> None:
        """Do one tick of work, or wait for one tick."""
        if self.work and self.work[0][0] == "work":
            self.work[0][1] -= 1
            self.busy.append((self.work[0][2], self.work[0][3], now))
        elif self.work:
            self.busy.append(("stall", self.work[0][1][1], now))


def program(plan: Plan, layers: list[LayerCost], link: Link) -> tuple[Queue, Queue, Queue]:
    """Write what the host would queue for a step."""
    compute, d2h, h2d = Queue(), Queue(), Queue()
    offloading: set[int] = set()
    released: set[int] = set()
    made: dict[int, list[int]] = {i: [] for i in range(len(layers))}
    on_host: set[tuple[int, int]] = set()
    returns: set[tuple[int, int]] = set()
    # Of each layer that is released incrementally: its resident tensors, and the bytes still to release.
    unreleased: dict[int, deque[int]] = {}
    short: dict[int, int] = {}
    releasing: int | None = None
    # The layer that is prefetched during a backward, and the bytes that it may use: not the first quarter freed.

    def ticks(seconds: float) -> int:
        assert seconds == int(seconds)
        return int(seconds)

    def offload(i: int, k: int) -> None:
        d2h.put("wait", ("ready", i, k))
        d2h.put("work", ticks(link.latency + layers[i].saved[k].nbytes / link.d2h), "D2H", i)
        d2h.put("signal", ("out", i, k))

    def reload(i: int, k: int) -> None:
        compute.put("signal", ("begin in", i, k))
        h2d.put("wait", ("begin in", i, k))
        h2d.put("work", ticks(link.latency + layers[i].saved[k].nbytes / link.h2d), "H2D", i)
        h2d.put("signal", ("in", i, k))
        on_host.discard((i, k))
        returns.add((i, k))

    def free(i: int, k: int) -> None:
        # A copy out that was queued and never waited for still reads the memory of its layer.
        for other in made[i] if i in offloading - released else ():
            compute.put("wait", ("out", i, other))
        compute.put("bytes", -layers[i].saved[k].nbytes)

    def release(i: int, k: int) -> None:
        compute.put("wait", ("out", i, k))
        on_host.add((i, k))

    def release_incrementally(nbytes: int) -> None:
        if releasing is None:
            return
        short[releasing] += nbytes
        while unreleased[releasing] and short[releasing] > 0:
            k = unreleased[releasing].popleft()
            release(releasing, k)
            compute.put("bytes", -layers[releasing].saved[k].nbytes)
            short[releasing] -= layers[releasing].saved[k].nbytes

    def act(when: When, at: int) -> None:
        nonlocal releasing
        for action in plan.at(when, at):
            i = action.layer
            if action.do is Do.OFFLOAD:
                offloading.add(i)
                for k in made[i]:
                    offload(i, k)
            elif action.do is Do.INCREMENTAL_RELEASE:
                releasing, unreleased[i], short[i] = i, deque(made[i]), 0
            elif action.do is Do.RELEASE:
                released.add(i)
                rest = [*unreleased[i]] if i in unreleased else made[i]
                for k in rest:
                    release(i, k)
                if rest:
                    compute.put("bytes", -sum(layers[i].saved[k].nbytes for k in rest))
                if i in unreleased:
                    unreleased[i].clear()
            else:
                rest = [k for k in made[i] if (i, k) in on_host]
                if rest:
                    compute.put("bytes", sum(layers[i].saved[k].nbytes for k in rest))
                for k in reversed(rest):
                    reload(i, k)

    for i, cost in enumerate(layers):
        act(When.FORWARD_START, i)
        done = 0.0
        for k, saved in enumerate(cost.saved):
            compute.put("work", ticks((saved.saved_at - done) * cost.forward), "forward", i)
            done = saved.saved_at
            compute.put("bytes", saved.nbytes)
            compute.put("signal", ("ready", i, k))
            release_incrementally(saved.nbytes)
            made[i].append(k)
            if i in offloading:
                offload(i, k)
        compute.put("work", ticks((1 - done) * cost.forward), "forward", i)
        releasing = None
        act(When.FORWARD_END, i)
    for i, cost in reversed(list(enumerate(layers))):
        act(When.BACKWARD_START, i)
        done = 0.0
        last = None
        for k in sorted(made[i], key=lambda k: (cost.saved[k].needed_at, -k)):
            compute.put("work", ticks((cost.saved[k].needed_at - done) * cost.backward), "backward", i)
            done = cost.saved[k].needed_at
            if last is not None:
                free(i, last)
            if (i, k) in on_host:
                compute.put("bytes", cost.saved[k].nbytes)
                reload(i, k)
            if (i, k) in returns:
                compute.put("wait", ("in", i, k))
            last = k
        compute.put("work", ticks((1 - done) * cost.backward), "backward", i)
        if last is not None:
            free(i, last)
        act(When.BACKWARD_END, i)
    return compute, d2h, h2d


def play(queues: tuple[Queue, Queue, Queue]) -> int:
    """Let the queues work until compute has nothing left; return the tick, and let the copies finish."""
    signals: set[Hashable] = set()
    now, end = 0, None
    while True:
        while sum(queue.settle(now, signals) for queue in queues):
            pass
        if end is None and not queues[0].work:
            end = now
        if not any(queue.work for queue in queues):
            assert end is not None
            return end
        for queue in queues:
            queue.tick(now)
        now += 1
        assert now < 100_000, "a queue waits for a signal that never comes"


def busy_ticks(spans: tuple, names: dict[Kind, str]) -> list[tuple[str, int, int]]:
    return [(names[s.kind], s.layer, t) for s in spans for t in range(int(s.start), int(s.end))]


@st.composite
def layer_costs(draw: st.DrawFn) -> LayerCost:
    quarters = st.integers(0, 4).map(lambda k: k * QUARTER)
    saved_at = sorted(draw(st.lists(quarters, max_size=3)))
    saved = [Saved(draw(st.integers(1, 9)), at, draw(quarters)) for at in saved_at]
    return LayerCost(4.0 * draw(st.integers(0, 3)), 4.0 * draw(st.integers(0, 4)), tuple(saved))


links = st.builds(
    Link,
    d2h=st.sampled_from([1.0, 0.5, 0.25]),
    h2d=st.sampled_from([1.0, 0.5, 0.25]),
    latency=st.integers(0, 2).map(float),
)


def agree(plan: Plan, layers: list[LayerCost], link: Link) -> tuple[Queue, Queue, Queue]:
    result = simulate(plan, layers, link)
    compute, d2h, h2d = queues = program(plan, layers, link)
    end = play(queues)

    assert result.step_time == end
    assert list(result.timeline.resident) == compute.resident
    lane = result.timeline.of(Kind.FORWARD, Kind.BACKWARD, Kind.STALL)
    names = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.STALL: "stall"}
    assert busy_ticks(lane, names) == compute.busy
    for kind, queue in ((Kind.D2H, d2h), (Kind.H2D, h2d)):
        copies = [item for item in queue.busy if item[0] != "stall"]
        assert busy_ticks(result.timeline.of(kind), {kind: kind.name}) == copies
    assert result.stall_seconds == sum(item[0] == "stall" for item in compute.busy)
    released = [i for i in plan.offloaded if plan.find(Do.RELEASE, i)]
    assert result.bytes_offloaded == sum(layers[i].nbytes for i in plan.offloaded)
    assert result.bytes_reloaded == sum(layers[i].nbytes for i in released)
    on_demand = [i for i in released if not plan.find(Do.RELOAD, i)]
    assert result.reloaded_on_demand == sum(len(layers[i].saved) for i in on_demand)
    return queues


def without(plan: Plan, do: Do) -> Plan:
    steps = {event: tuple(a for a in actions if a.do is not do) for event, actions in plan.steps.items()}
    return Plan(plan.model_layers, steps)


def test_simulate_agrees_with_queues_moved_tick_by_tick() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=250, deadline=None)
    @given(data=st.data(), layers=st.lists(layer_costs(), min_size=1, max_size=5), link=links)
    def check(data: st.DataObject, layers: list[LayerCost], link: Link) -> None:
        plan = data.draw(st.one_of(plans(len(layers)), group_plans(len(layers))))
        agree(plan, layers, link)
        do = Do.INCREMENTAL_RELEASE
        at = Counter(event for i in plan.offloaded if (event := plan.find(do, i)) is not None)
        seen["none"] += not at
        seen["two at one layer"] += max(at.values(), default=0) > 1
        timelines = [simulate(each, layers, link).timeline for each in (plan, without(plan, do))]
        seen["it matters"] += timelines[0] != timelines[1]

    check()
    assert min(seen.values()) > 0, seen


def test_a_reloaded_layer_releases_nothing_more() -> None:
    """It was released and reloaded at the event of its incremental release."""
    layers = [LayerCost(4.0, 4.0, (Saved(4, 0.5, 0.5),))] * 2
    start = Event(When.FORWARD_START, 1)
    steps = {
        Event(When.FORWARD_START, 0): (Action(Do.OFFLOAD, 0),),
        start: (Action(Do.INCREMENTAL_RELEASE, 0), Action(Do.RELEASE, 0), Action(Do.RELOAD, 0)),
    }
    compute, _, h2d = agree(Plan(2, steps), layers, Link(4.0, 4.0))
    assert [nbytes for _, nbytes in compute.resident] == [4, 0, 4, 8, 4, 0]
    assert [item[0] for item in h2d.busy].count("H2D") == 1
