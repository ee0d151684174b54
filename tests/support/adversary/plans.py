"""Strategies for plans: any legal plan, and plans of a `GroupSchedule`."""

from hypothesis import strategies as st

from actoffload.schedule.plan import Action, Do, Event, Plan, When
from actoffload.schedule.schedules import GroupSchedule


@st.composite
def plans(draw: st.DrawFn, model_layers: int) -> Plan:
    """Draw any legal plan.

    Each layer has the first none, one, two or three of offload, release and reload, at any events.  Common choices are
    drawn more often.
    """
    events = list(Plan(model_layers).events())
    at = {event: k for k, event in enumerate(events)}
    steps: dict[Event, tuple[Action, ...]] = {}

    def put(do: Do, layer: int, place: int) -> None:
        steps[events[place]] = (*steps.get(events[place], ()), Action(do, layer))

    for layer in draw(st.permutations(range(model_layers))):
        last = at[Event(When.BACKWARD_START, layer)]
        many = draw(st.sampled_from([3, 3, 3, 2, 1, 0]))
        if many == 0:
            continue
        own = at[Event(When.FORWARD_START, layer)]
        offload = draw(st.one_of(st.just(own), st.integers(own, last)))
        put(Do.OFFLOAD, layer, offload)
        if many == 1:
            continue
        earliest = max(offload, at[Event(When.FORWARD_END, layer)])
        release = draw(st.one_of(st.just(min(earliest + 1, last)), st.integers(earliest, last)))
        put(Do.RELEASE, layer, release)
        if many == 2:
            continue
        put(Do.RELOAD, layer, draw(st.one_of(st.just(min(release + 1, last)), st.integers(release, last))))
    return Plan(model_layers, steps)


@st.composite
def group_plans(draw: st.DrawFn, groups: int) -> Plan:
    """Draw the plan of a `GroupSchedule` that offloads at least one group if there are several."""
    kinds = draw(st.lists(st.sampled_from("ab"), min_size=groups, max_size=groups))
    least = 1 if groups > 1 else 0
    number = draw(st.one_of(st.none(), st.integers(least, max(least, groups - 1))))
    return GroupSchedule(number, max_inflight=draw(st.sampled_from([None, 1, 2]))).plan(kinds)
