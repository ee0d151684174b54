"""Tables and a picture from the results: no figure of them is typed by hand.

    python benchmarks/report.py            writes report.md, compare.png and llama.png beside the results
    python benchmarks/report.py --check    fails if report.md is not what the results give

`headline` is the sentence on the landing page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import report_llama
from report_parts import GIB, MIB, Target, origin, table
from results_file import RESULTS, digest, read

OURS, CHECKPOINT, SAVE, NOTHING = "actoffload", "checkpoint", "save_on_cpu", "no offload"
NAMES = {
    OURS: "actoffload",
    CHECKPOINT: "torch.utils.checkpoint",
    SAVE: "save_on_cpu(pin_memory=True)",
    NOTHING: "no offload",
    "no offload, again": "no offload, again",
}
TITLES = {"gpt": "Twelve GPT blocks", "linear": "Twelve linear layers"}
SHORT = {"gpt": "GPT", "linear": "Linear layers"}


def arm(data: dict[str, Any], method: str, count: int) -> dict[str, Any] | None:
    """Return the entry of one arm, or None."""
    return next((a for a in data["arms"] if (a["method"], a["num_layers"]) == (method, count)), None)


def model_line(data: dict[str, Any]) -> str:
    """Describe a model in words."""
    batch, length, hidden = data["settings"]["shape"]
    kind = f"{data['settings']['heads']} heads, " if data["settings"]["heads"] else ""
    return f"hidden size {hidden}, {kind}sequence {length}, batch {batch}, {data['settings']['dtype']}"


def _order(entry: dict[str, Any]) -> tuple[int, int]:
    return list(NAMES).index(entry["method"]) if entry["num_layers"] else -1, entry["num_layers"]


def comparison(data: dict[str, Any]) -> str:
    """Return the table of all arms."""
    rows = [
        (
            NAMES[a["method"]],
            str(a["num_layers"]),
            f"{a['seconds'] * 1e3:.2f}",
            f"{a['ratio']:.3f}",
            f"{a['peak_bytes'] / GIB:.2f}",
            f"{a['drop_bytes'] / GIB:.2f}",
        )
        for a in sorted(data["arms"], key=_order)
    ]
    return table(("method", "layers", "step (ms)", "× no offload", "peak (GiB)", "drop (GiB)"), rows)


def details(data: dict[str, Any]) -> str:
    """Return the table of what is derived for the arms of ours."""
    rows = [
        (
            str(a["num_layers"]),
            f"{a['bytes_offloaded'] / MIB:.0f}",
            f"{a['r'] * 100:.2f} %",
            f"{a['host_ratio']:.3f}",
            f"{a['bound_ratio']:.3f}",
            f"{a['predicted_seconds'] * 1e3:.2f}",
            f"{a['deviation'] * 100:+.1f} %",
            f"{a['copies']['d2h'] / 1e9:.1f} / {a['copies']['h2d'] / 1e9:.1f}",
        )
        for a in data["arms"]
        if a["method"] == OURS
    ]
    head = ("layers", "offloaded (MiB)", "R", "pinned / offloaded", "step / bound", "simulate (ms)", "step − simulate")
    return table((*head, "D2H / H2D in the step (GB/s)"), rows)


def targets(results: dict[str, dict[str, Any]]) -> list[Target]:
    """Return what was to be reached, as far as it was measured."""
    found: list[Target] = []
    gpt = results.get("gpt")
    if gpt is not None:
        four, ten = arm(gpt, OURS, 4), arm(gpt, OURS, 10)
        if four is not None:
            found.append(Target("GPT, 4 of 12 layers: step / no offload", 1.010, four["ratio"], ""))
        if ten is not None:
            found.append(Target("GPT, 10 of 12 layers: step / bound", 1.10, ten["bound_ratio"], ""))
            what = "GPT, 10 of 12 layers: distance from simulate"
            found.append(Target(what, 3.0, abs(ten["deviation"]) * 100, " %", digits=2))
    for name in ("gpt", "linear"):
        ours = [a for a in results.get(name, {"arms": []})["arms"] if a["method"] == OURS]
        if ours:
            worst = min(a["r"] for a in ours) * 100
            found.append(Target(f"{SHORT[name]}: smallest R", 99.5, worst, " %", at_least=True, digits=2))
            most = max(a["host_ratio"] for a in ours)
            found.append(Target(f"{SHORT[name]}: pinned bytes held / bytes offloaded", 1.05, most, ""))
    for case in results.get("overhead", {"cases": []})["cases"]:
        if case["case"].startswith("autograd"):
            continue  # not ours: the floor under the others
        limit = 60 if case["case"].startswith("offloaded") else 5
        found.append(
            Target(f"Host time for a saved tensor: {case['case']}", limit, case["seconds"] * 1e6, " µs", digits=1)
        )
    if "llama" in results:
        found += report_llama.targets(results["llama"])
    return found


def overhead(data: dict[str, Any]) -> str:
    """Return the table of host times."""
    rows = [
        (
            case["case"],
            f"{case['forward_seconds'] * 1e6:.1f}",
            f"{case['backward_seconds'] * 1e6:.1f}",
            f"{case['seconds'] * 1e6:.1f}",
        )
        for case in data["cases"]
    ]
    return table(("saved tensor", "forward (µs)", "backward (µs)", "both (µs)"), rows)


def profile(data: dict[str, Any]) -> str:
    """Return the table of what the device was busy with in a profiled step."""
    busy, total = data["busy"], data["seconds"]
    names = (("kernels", "kernels"), ("d2h", "copies to the host"), ("h2d", "copies to the device"))
    found = [(name, busy.get(lane, 0.0)) for lane, name in names]
    rows = [*found, ("no kernel runs", total - busy.get("kernels", 0.0)), ("the step", total)]
    lines = [(name, f"{seconds * 1e3:.2f}", f"{seconds / total * 100:.1f} %") for name, seconds in rows]
    return table(("what", "ms", "of the step"), lines)


def runs(folder: Path) -> str:
    """Return the table of all recorded runs of the GPT benchmark, or nothing if there are not several.

    The lent machines share their host with others: what one run says of milliseconds, another may not.
    """
    rows = []
    for path in sorted((folder / "runs").glob("gpt-*.json")):
        data = read(path.parent, path.stem)
        ours = {} if data is None else {n: arm(data, OURS, n) for n in (2, 4, 10)}
        if data is None or any(found is None for found in ours.values()):
            continue
        two, four, ten = (found for found in ours.values() if found is not None)
        spread = f"{min(ten['samples']) * 1e3:.0f} to {max(ten['samples']) * 1e3:.0f}"
        rows.append(
            (
                f"{data['date'][:16].replace('T', ' ')}, sources `{data['source_digest'][:8]}`",
                f"{data['noise'] * 100:.2f} %",
                f"{two['ratio']:.3f}",
                f"{four['ratio']:.3f}",
                f"{ten['bound_ratio']:.3f}",
                f"{ten['deviation'] * 100:+.1f} %",
                spread,
            )
        )
    head = ("run", "noise", "2 layers", "4 layers", "10 layers / bound", "10 layers − simulate", "10 layers, all (ms)")
    return table(head, rows) if len(rows) > 1 else ""


def report(results: dict[str, dict[str, Any]], folder: Path = RESULTS) -> str:
    """Return the page's tables as Markdown."""
    parts = ["<!-- Written by benchmarks/report.py from the results beside it; do not edit. -->"]
    if not results:
        return parts[0] + "\n\nNo results are recorded yet.\n"
    parts += ["## Targets", table(("what", "target", "measured", ""), (t.row() for t in targets(results)))]
    for name in ("gpt", "linear"):
        data = results.get(name)
        if data is None:
            continue
        parts += [f"## {TITLES[name]}", f"{model_line(data)[:1].upper()}{model_line(data)[1:]}.", comparison(data)]
        noise = f"The two arms without offload differ by {data['noise'] * 100:.2f} %."
        compute = data["compute"]
        text = (
            f"{noise} Forward computes for {compute['forward'] * 1e3:.2f} ms and backward for "
            f"{compute['backward'] * 1e3:.2f} ms. The bound is the larger of compute and copies, in forward and in "
            "backward; simulate is given these layers' measured costs and the link's bandwidth."
        )
        parts += [text, details(data), origin(data)]
    if "llama" in results:
        parts += report_llama.sections(results["llama"])
    every_run = runs(folder)
    if every_run:
        text = "Every run of the GPT benchmark that was made, in order; the tables above are of the last one."
        parts += ["## All runs", text, every_run]
    if "profile-gpt" in results:
        data = results["profile-gpt"]
        title = f"## Where a step goes, {data['num_layers']} of {data['settings']['layers']} GPT blocks offloaded"
        parts += [title, profile(data), origin(data)]
    if "overhead" in results:
        parts += ["## Host time", overhead(results["overhead"]), origin(results["overhead"])]
    return "\n\n".join(parts) + "\n"


def headline(folder: Path = RESULTS) -> str:
    """Return one sentence for the landing page: the most layers that cost at most 1 %, else the cheapest arm."""
    data = read(folder, "gpt")
    ours = [] if data is None else [a for a in data["arms"] if a["method"] == OURS]
    if data is None or not ours or data["device"]["reference"]:
        return "No GPU results are recorded yet."
    free = [a for a in ours if a["ratio"] <= 1.010]
    best = max(free, key=lambda a: a["num_layers"]) if free else min(ours, key=lambda a: a["ratio"])
    peak = best["peak_bytes"] + best["drop_bytes"]
    count, layers = best["num_layers"], data["settings"]["layers"]
    text = (
        f"On one {data['device']['name']}, offloading {count} of {layers} GPT blocks ({model_line(data)}) lowers the "
        f"peak from {peak / GIB:.1f} to {best['peak_bytes'] / GIB:.1f} GiB at {best['ratio']:.3f} × the step time"
    )
    other = arm(data, CHECKPOINT, count)
    if other is not None:
        text += f"; checkpointing the same blocks takes {other['ratio']:.3f} ×"
    return text + "."


def notes(folder: Path = RESULTS) -> str:
    """Return what a reader has to know of the results: what was missed and why, and whether the sources changed."""
    results = load(folder)
    lines = []
    current = digest()
    if any(data["source_digest"] != current for data in results.values()):
        lines.append("The library's sources have changed since these results were measured.")
    gpt = results.get("gpt")
    four = None if gpt is None else arm(gpt, OURS, 4)
    if gpt is not None and four is not None and four["ratio"] > 1.010:
        out = four["bytes_offloaded"] / gpt["link"]["d2h"]
        room = gpt["compute"]["forward"] * (gpt["settings"]["layers"] - 1) / gpt["settings"]["layers"]
        stall = four["copies"]["stall_seconds"] / (four["seconds"] / four["ratio"])
        lines.append(
            f"Four of twelve GPT blocks miss 1.010: their {four['bytes_offloaded'] / GIB:.1f} GiB take "
            f"{out * 1e3:.1f} ms on the link, and must be gone when the last block starts, after {room * 1e3:.1f} ms "
            f"of compute. In recorded steps, compute waited {stall * 100:.1f} % of the step without offload."
        )
    ten = None if gpt is None else arm(gpt, OURS, 10)
    if gpt is not None and ten is not None and (ten["bound_ratio"] > 1.10 or abs(ten["deviation"]) > 0.03):
        lines.append(
            f"Ten of twelve miss their targets in this run: its steps spread from {min(ten['samples']) * 1e3:.0f} to "
            f"{max(ten['samples']) * 1e3:.0f} ms, and the two arms without offload differ by "
            f"{gpt['noise'] * 100:.1f} %. The link may be shared with other machines of the host; "
            "compare all runs below."
        )
    cases = {case["case"]: case["seconds"] * 1e6 for case in results.get("overhead", {"cases": []})["cases"]}
    floor = next((seconds for case, seconds in cases.items() if case.startswith("autograd")), None)
    if floor is not None and any(not target.met for target in targets(results) if target.what.startswith("Host time")):
        lines.append(
            f"The host times are those of Python on this machine's host: autograd takes {floor:.1f} µs there to call "
            "hooks that do nothing. They delay no kernel as long as the host is ahead of the device."
        )
    return " ".join(lines)


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Read all results of a folder."""
    found = {name: read(folder, name) for name in ("gpt", "linear", "llama", "profile-gpt", "overhead")}
    return {name: data for name, data in found.items() if data is not None}


def main(arguments: list[str]) -> int:
    """Write the report, or check it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--check", action="store_true", help="compare report.md instead of writing it")
    options = parser.parse_args(arguments)
    results = load(options.results)
    text, path = report(results, options.results), options.results / "report.md"
    if options.check:
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            return 0
        print("report.md is not what the results give; run python benchmarks/report.py")
        return 1
    path.write_text(text, encoding="utf-8")
    if "gpt" in results:
        from picture import draw

        draw(results["gpt"], options.results / "compare.png")
    if "llama" in results:
        from picture import draw_llama

        draw_llama(results["llama"], options.results / "llama.png")
    print(headline(options.results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
