"""Tables and targets of the Llama benchmark; `report` puts them on the page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from report_parts import GIB, MIB, Target, origin, table

OURS, NOTHING = "actoffload", "no offload"
AT_BOUND, FREE, R, HOST = 1.10, 1.010, 99.5, 1.0
PINNED = 1.05
PICTURE = "![Step time of Llama layers and the bound worked out for it, by the number of layers offloaded](llama.png)"
LENGTHS = {"8k": "8k tokens", "32k": "32k tokens"}


def ours(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arms with layers offloaded, by their number."""
    return sorted((a for a in part["arms"] if a["method"] == OURS), key=lambda a: int(a["num_layers"]))


def numbers(arms: Iterable[dict[str, Any]]) -> str:
    """Return numbers of layers in words: "1 to 3", "2", "1, 4 to 6"."""
    runs: list[list[int]] = []
    for count in sorted(a["num_layers"] for a in arms):
        if runs and count == runs[-1][1] + 1:
            runs[-1][1] = count
        else:
            runs.append([count, count])
    return ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in runs)


def targets(data: dict[str, Any]) -> list[Target]:
    """Return what was to be reached, as far as it was measured."""
    found: list[Target] = []
    for name, words in LENGTHS.items():
        part = data["parts"].get(name)
        if part is None:
            continue
        arms = ours(part)
        start = f"Llama, {words}"
        worst = max(arms, key=lambda a: float(a["bound_ratio"]))
        what = f"{start}: step / bound (N = {numbers(arms)}, worst at {worst['num_layers']})"
        found.append(Target(what, AT_BOUND, worst["bound_ratio"], ""))
        free = [a for a in arms if a["fits"]]
        if free:
            worst = max(free, key=lambda a: float(a["ratio"]))
            what = f"{start}: step / no offload where copies fit (N = {numbers(free)}, worst at {worst['num_layers']})"
            found.append(Target(what, FREE, worst["ratio"], ""))
        found.append(Target(f"{start}: smallest R", R, min(a["r"] for a in arms) * 100, " %", at_least=True, digits=2))
        held = arms[-1]["host_bytes"] / arms[-1]["bytes_offloaded"]
        found.append(Target(f"{start}: pinned bytes held / bytes offloaded", PINNED, held, ""))
    host = data["parts"].get("host")
    if host is not None:
        what = "Llama: host time added for each offloaded layer"
        found.append(Target(what, HOST, host["added_per_layer"] * 1e3, " ms", digits=2))
    return found


def sections(data: dict[str, Any]) -> list[str]:
    """Return the paragraphs and tables of the page."""
    parts = ["## Llama layers"]
    first = next((data["parts"][name] for name in LENGTHS if name in data["parts"]), None)
    if first is not None:
        parts += [_model(first["settings"]), PICTURE, *_saved(first)]
    for name, words in LENGTHS.items():
        if name in data["parts"]:
            parts += [f"### {words}", *_length(data["parts"][name])]
    if "host" in data["parts"]:
        parts += ["### Host time of a layer", *_host(data["parts"]["host"])]
    return [*parts, origin(data)]


def _model(settings: dict[str, Any]) -> str:
    return (
        "A stack of decoder layers like those of Hugging Face's Llama, as an unmodified program has them: RMS norm "
        "written out in float32, rotary embedding, attention with grouped queries by the flash kernel, SwiGLU. "
        f"Hidden size {settings['hidden']}, intermediate size {settings['intermediate']}, {settings['heads']} heads, "
        f"{settings['kv_heads']} key and value heads, batch 1, {settings['dtype']}; offloaded by "
        "`actoffload.offload(model, num_layers=N)`."
    )


def _saved(part: dict[str, Any]) -> list[str]:
    """Return what autograd saves in one layer."""
    tokens, limit = part["settings"]["tokens"], part["settings"]["min_bytes"]
    rows = []
    for s in sorted(part["saved"], key=lambda s: len(s["layers"]) > 1):
        verdict = "yes"
        if len(s["layers"]) > 1:
            verdict = "no: one for all layers"
        elif s["tensor_nbytes"] < limit:
            verdict = "no: small"
        shape = " × ".join(str(size) for size in s["shape"]) or "scalar"
        rows.append((f"{s['module']}", f"{s['dtype']}, {shape}", f"{s['nbytes'] / MIB:.2f}", verdict))
    own = sum(s["nbytes"] for s in part["saved"] if len(s["layers"]) == 1)
    text = (
        f"Autograd saves {own / MIB:.0f} MiB in a layer at {tokens} tokens, {own / tokens / 1024:.1f} KiB for each "
        "token, weights apart:"
    )
    return [text, table(("saved in", "tensor", "MiB", "leaves"), rows)]


def _length(part: dict[str, Any]) -> list[str]:
    settings, link = part["settings"], part["link"]
    arms = ours(part)
    repeats = {len(a["samples"]) for a in part["arms"]}
    many = " or ".join(str(count) for count in sorted(repeats, reverse=True))
    none = next(a for a in part["arms"] if a["method"] == NOTHING)
    rows = [
        ("0", "", "", "", "", "", f"{none['seconds'] * 1e3:.1f}", "1.000", "", f"{none['peak_bytes'] / GIB:.2f}", "")
    ]
    rows += [
        (
            str(a["num_layers"]),
            f"{a['bytes_offloaded'] / GIB:.2f}",
            f"{a['d2h_seconds'] * 1e3:.1f}",
            f"{a['h2d_seconds'] * 1e3:.1f}",
            "yes" if a["fits"] else "no",
            f"{a['bound_seconds'] * 1e3:.1f}",
            f"{a['seconds'] * 1e3:.1f}",
            f"{a['ratio']:.3f}",
            f"{a['bound_ratio']:.3f}",
            f"{a['peak_bytes'] / GIB:.2f}",
            f"{a['r'] * 100:.2f} %",
        )
        for a in arms
    ]
    head = ("layers", "offloaded (GiB)", "D2H (ms)", "H2D (ms)", "fits", "bound (ms)", "step (ms)", "× no offload")
    text = (
        f"{settings['layers']} layers, {settings['tokens']} tokens. {_rounds(part)} The link has D2H "
        f"{link['d2h'] / 1e9:.1f} GB/s and H2D {link['h2d'] / 1e9:.1f} GB/s, at which the copies take the times below. "
        "They fit where D2H takes no longer than forward, and H2D no longer than backward. The two arms without "
        f"offload differ by {part['noise'] * 100:.2f} %. Medians of {many} measurements of {settings['steps']} step"
        f"{'s' if settings['steps'] > 1 else ''} each."
    )
    tables = table((*head, "step / bound", "peak (GiB)", "R"), rows)
    return [text, tables, *_below(arms), *_missed(arms), *_driver(part), *_timelines(part)]


def _rounds(part: dict[str, Any]) -> str:
    """Say for how long forward and backward compute without offload, as measured beside which numbers of layers."""
    rounds: dict[tuple[float, float], list[dict[str, Any]]] = {}
    for a in ours(part):
        rounds.setdefault((a["compute"]["forward"], a["compute"]["backward"]), []).append(a)
    if len(rounds) == 1:
        ((forward, backward),) = rounds
        return f"Forward computes for {forward * 1e3:.1f} ms and backward for {backward * 1e3:.1f} ms."
    words = "; ".join(
        f"N = {numbers(arms)} beside forward of {forward * 1e3:.1f} ms and backward of {backward * 1e3:.1f} ms, "
        f"{(forward + backward) * 1e3:.1f} ms together"
        for (forward, backward), arms in rounds.items()
    )
    return (
        f"Steps are timed in {len(rounds)} rounds, each with steps without offload of its own, to which the bounds and "
        f"ratios of its rows refer: {words}. The row of 0 layers is of the first round."
    )


def _below(arms: list[dict[str, Any]]) -> list[str]:
    """Say why steps lie below their bound, if any does."""
    below = [a for a in arms if a["bound_ratio"] < 1]
    if not below:
        return []
    least = min(a["bound_ratio"] for a in below)
    return [
        f"Steps with N = {numbers(below)} lie below their bound, by {(1 - least) * 100:.1f} % at most: the bound is "
        "worked out from compute without offload and from the link alone, each measured apart from these steps."
    ]


def _missed(arms: list[dict[str, Any]]) -> list[str]:
    """Say which numbers of layers miss their targets, and by what."""
    lines = []
    for what, limit, key, of in (
        ("the bound", AT_BOUND, "bound_ratio", arms),
        ("no offload, although their copies fit", FREE, "ratio", [a for a in arms if a["fits"]]),
    ):
        late = [a for a in of if a[key] > limit]
        if late:
            times = ", ".join(f"{a[key]:.3f} × with {a['num_layers']}" for a in late)
            lines.append(f"Slower than {limit:.2f} × {what}: {times}.")
    return [" ".join(lines)] if lines else []


def _driver(part: dict[str, Any]) -> list[str]:
    """Say how often memory was taken from the driver while the steps were timed."""
    calls = {name: count for name, count in part["driver_calls"].items() if count}
    if not part["driver_calls"]:
        return []
    if not calls:
        return ["No memory was taken from the driver, on the device or on the host, while these steps were timed."]
    named = ", ".join(f"{count} × {name}" for name, count in calls.items())
    return [f"Calls of the driver for memory while these steps were timed, the untimed first ones among them: {named}."]


def _timelines(part: dict[str, Any]) -> list[str]:
    """Return the sums of the recorded steps."""
    rows = []
    for step in part["timelines"]:
        seconds, speed = step["seconds"], step["bandwidth"]
        stalls = {direction: sum(s[direction] for s in step["stalls"]) for direction in ("forward", "backward")}
        rows.append(
            (
                str(step["num_layers"]),
                f"{step['end_seconds'] * 1e3:.1f}",
                f"{seconds['forward'] * 1e3:.1f}",
                f"{seconds['backward'] * 1e3:.1f}",
                f"{stalls['forward'] * 1e3:.1f}",
                f"{stalls['backward'] * 1e3:.1f}",
                f"{speed.get('d2h', 0.0) / 1e9:.1f}",
                f"{speed.get('h2d', 0.0) / 1e9:.1f}",
            )
        )
    head = ("recorded step, layers", "step (ms)", "forward (ms)", "backward (ms)", "waited in forward (ms)")
    return [table((*head, "in backward (ms)", "D2H (GB/s)", "H2D (GB/s)"), rows)] if rows else []


def _host(part: dict[str, Any]) -> list[str]:
    settings, layers = part["settings"], part["settings"]["layers"]
    names = {
        "without": "no offload",
        "paused": "paused: the hooks alone",
        "with": "offloaded",
        "bare": "hooks and calls of CUDA alone",
    }
    rows = [
        (names[case], f"{t['forward'] * 1e3:.2f}", f"{t['backward'] * 1e3:.2f}", f"{sum(t.values()) * 1e3:.2f}")
        for case, t in part["host"].items()
    ]
    count, tensors = part["num_layers"], part["tensors_offloaded"]
    text = (
        f"For how long the host is busy with a step of {layers} layers and {settings['tokens']} tokens, so that the "
        f"device waits for it and not the other way round, with {count} of them and {tensors} tensors offloaded: as "
        "many for each layer as above, because the limit of size is as much smaller. Offloading adds "
        f"{part['added'] * 1e3:.2f} ms, which is {part['added_per_layer'] * 1e3:.3f} ms for each offloaded layer or "
        f"{part['added_per_tensor'] * 1e6:.0f} µs for each tensor; the hooks alone add "
        f"{part['added_paused'] / layers * 1e3:.3f} ms for each layer. When the host was done, the device was busy for "
        f"another {part['behind']['without'] * 1e3:.2f} ms without offload and {part['behind']['with'] * 1e3:.2f} ms "
        "with it."
    )
    if "added_bare" in part:
        least = part["added_bare"] / count * 1e3
        text += (
            f" The last row moves {part['tensors_bare']} storages with no more than hooks and calls of CUDA, by code "
            f"that knows the model and neither checks nor counts: that adds {least:.3f} ms for each offloaded layer."
        )
    return [text, table(("host time of a step", "forward (ms)", "backward (ms)", "both (ms)"), rows)]
