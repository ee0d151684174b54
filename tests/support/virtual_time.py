"""Programs that take a given time and save given bytes, run on the reference device and simulated."""

import torch
from hypothesis import strategies as st

from actoffload.context import OffloadContext
from actoffload.device import ReferenceDevice
from actoffload.engine.engine import Engine
from actoffload.report import Statistics
from actoffload.schedule import Kind, LayerCost, Link, Plan, Saved, Simulation, Timeline


class Work(torch.autograd.Function):
    """Computes for a while in forward and in backward, and saves tensors of some bytes when forward ends.

    A device that counts its memory is given the tensors, which are floats then.  Others are integers, which are copied
    as soon as they are saved, and not when the next operator saves.
    """

    @staticmethod
    def forward(ctx, x, device, seconds, *sizes):
        device.compute(seconds[0])
        ctx.device, ctx.seconds = device, seconds[1]
        if hasattr(device, "count"):
            ctx.save_for_backward(*(device.count(torch.zeros(nbytes // 4)) for nbytes in sizes))
        else:
            ctx.save_for_backward(*(torch.zeros(nbytes, dtype=torch.uint8) for nbytes in sizes))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors  # waits for all of them
        ctx.device.compute(ctx.seconds)
        return grad, *[None] * (2 + len(saved))


def layer_of(cost: LayerCost, device: ReferenceDevice):
    """Return a layer that takes as long and saves as much as a cost says."""
    if cost.unpacks_at_once:
        assert all(saved.saved_at == 1.0 for saved in cost.saved)
        sizes = [saved.nbytes for saved in cost.saved]
        return lambda x: Work.apply(x, device, (cost.forward, cost.backward), *sizes)
    saved_at = [saved.saved_at * cost.forward for saved in cost.saved]
    needed_at = [saved.needed_at * cost.backward for saved in cost.saved]

    def layer(x):
        forward_done, needed_next = 0.0, [cost.backward, *needed_at]
        for k, saved in enumerate(cost.saved):
            behind = needed_next[k] - needed_at[k]  # until the tensor that was saved before is needed
            x = Work.apply(x, device, (saved_at[k] - forward_done, behind), saved.nbytes)
            forward_done = saved_at[k]
        head = needed_at[-1] if cost.saved else cost.backward
        return Work.apply(x, device, (cost.forward - forward_done, head))

    return layer


def run(context, sync, device, costs, *, after=lambda k, x: None) -> tuple[Timeline, Statistics, float]:
    with context.record_timeline() as recorder:
        x = torch.zeros(1, requires_grad=True) * 1.0
        for k, cost in enumerate(costs):
            device.compute(cost.gap_forward)
            with context:
                x = layer_of(cost, device)(x)
            x = sync(x)
            after(k, x)
            if cost.gap_backward:
                x = Work.apply(x, device, (0.0, cost.gap_backward))
        x.backward()
        del x
    return recorder.timeline(), context.statistics(), device.main.now


def agree(got: tuple[Timeline, Statistics, float], want: Simulation) -> None:
    timeline, statistics, end = got

    def copies(t: Timeline) -> list[tuple]:
        return sorted((s.kind.value, s.start, s.end, s.layer, s.nbytes) for s in t.of(Kind.D2H, Kind.H2D))

    assert copies(timeline) == copies(want.timeline)
    assert end == want.step_time
    assert timeline.end == want.timeline.end
    layers = range(max((s.layer for s in want.timeline.spans), default=0) + 1)

    def stalled(t: Timeline) -> list[float]:
        return [sum(s.seconds for s in t.of(Kind.STALL) if s.layer == k) for k in layers]

    assert stalled(timeline) == stalled(want.timeline)
    assert timeline.seconds(Kind.STALL) == want.stall_seconds

    def work(t: Timeline, kind: Kind) -> list[float]:
        """Seconds of compute of each layer: its spans less the stalls that lie in them."""
        spans, stalls = t.of(kind), t.of(Kind.STALL)
        return [
            sum(b.seconds - sum(s.seconds for s in stalls if b.start <= s.start and s.end <= b.end) for b in mine)
            for mine in ([span for span in spans if span.layer == k] for k in layers)
        ]

    assert work(timeline, Kind.FORWARD) == work(want.timeline, Kind.FORWARD)
    assert work(timeline, Kind.BACKWARD) == work(want.timeline, Kind.BACKWARD)
    assert statistics.peak_resident_bytes == want.peak_bytes
    assert timeline.peak_bytes == want.peak_bytes
    assert statistics.reloaded_on_demand == want.reloaded_on_demand
    assert statistics.bytes_offloaded == want.bytes_offloaded
    assert statistics.bytes_reloaded == want.bytes_reloaded
    assert statistics.resident_bytes == 0


eighths = st.integers(0, 8).map(lambda k: k / 8)
seconds = st.integers(0, 12).map(lambda k: k / 4)


@st.composite
def costs(draw, most: int = 4) -> LayerCost:
    count = draw(st.integers(0, most))
    saved_at = sorted(draw(eighths) for _ in range(count))
    needed_at = sorted((draw(eighths) for _ in range(count)), reverse=True)
    sizes = [draw(st.integers(1, 24)) * 256 for _ in range(count)]
    return LayerCost(
        draw(seconds), draw(seconds), tuple(Saved(*each) for each in zip(sizes, saved_at, needed_at, strict=True))
    )


bandwidths = st.sampled_from([256.0, 1024.0, 4096.0, 65536.0, float("inf")])
links = st.builds(Link, bandwidths, bandwidths)


def execute(plan: Plan, each: list[LayerCost], link: Link) -> tuple[Timeline, Statistics, float]:
    device = ReferenceDevice(link.d2h, link.h2d)
    context = OffloadContext(Engine(plan, device))
    return run(context, context.synchronize, device, each)
