"""Write the tables and pictures of the results; no figure of them is typed by hand.

    python benchmarks/report.py            writes report.md, development.md and the pictures beside the results
    python benchmarks/report.py --check    fails if they are not what the results give

Text and columns are in ``page.toml``.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import parallelism_page
from headline import CHECKPOINT, NOTHING, OURS, above, by_method, forward_seconds, headline, queue_seconds, readme
from page import PAGE, Data, origin, table, target, text
from pipelines_page import pipelines_sections, pipelines_targets
from results_file import RESULTS, ROOT, digest, read

WRITTEN = "<!-- Written by benchmarks/report.py from the results beside it; do not edit. -->"
README = ROOT / "README.md"
SECTIONS, LENGTHS, TARGETS = PAGE["names"]["sections"], PAGE["names"]["lengths"], PAGE["targets"]
READERS = ("frontier", "memory", "peers", "trainer", "parallelism", "pipelines", "machine")
DEVELOPERS = ("gpt", "linear", "llama", "overhead")
"""The results on each of the two pages, in their order."""
LONG = 1.5  # times the median of the steps of a round: such a step is named


def arm(data: Data, method: str, count: int) -> Data | None:
    """Return the entry of one arm, or None."""
    return next((a for a in data["arms"] if (a["method"], a["num_layers"]) == (method, count)), None)


def ours(part: Data) -> list[Data]:
    """Return the arms with offload, by their number of layers."""
    return sorted((a for a in part["arms"] if a["method"] == OURS), key=lambda a: int(a["num_layers"]))


def numbers(arms: Iterable[Data]) -> str:
    """Return numbers of layers in words."""
    return ", ".join(str(count) for count in sorted(a["num_layers"] for a in arms))


def targets(results: dict[str, Data]) -> list[Data]:
    """Return the lines of the targets whose figures were measured."""
    found = _trainer_targets(results["trainer"]) if "trainer" in results else []
    found += _frontier_targets(results["frontier"]) if "frontier" in results else []
    found += parallelism_page.targets(results["parallelism"]) if "parallelism" in results else []
    found += pipelines_targets(results["pipelines"]) if "pipelines" in results else []
    four, ten = (arm(results.get("gpt", {"arms": []}), OURS, count) for count in (4, 10))
    if four is not None and ten is not None:
        found += [target("gpt4", four["ratio"]), target("gpt10", ten["bound_ratio"])]
        found.append(target("simulate", abs(ten["deviation"])))
    for name, short in PAGE["names"]["short"].items():
        arms = ours(results.get(name, {"arms": []}))
        found += _memory_targets(short, arms, arms)
    kinds: dict[str, list[Data]] = {}
    for case in results.get("overhead", {"cases": []})["cases"]:
        if not case["case"].startswith("autograd"):  # autograd's own time, which the others contain
            kinds.setdefault(case["case"], []).append(case)
    for kind, cases in kinds.items():
        worst = max(cases, key=lambda case: float(case["seconds"]))
        counts = ", ".join(str(case["parameters"]) for case in cases) if len(cases) > 1 else ""
        words = f"{kind} ({counts} parameters, worst at {worst['parameters']})" if counts else kind
        found.append(target("copied" if kind.startswith("offloaded") else "passed", worst["seconds"], case=words))
    parts = results.get("llama", {"parts": {}})["parts"]
    for name, words in LENGTHS.items():
        arms = ours(parts.get(name, {"arms": []}))
        free = [a for a in arms if a["fits"]]
        for limit, key, some in (("bound", "bound_ratio", arms), ("free", "ratio", free)):
            if some:
                worst = max(some, key=lambda a: float(a[key]))
                which = f"N = {numbers(some)}, worst at {worst['num_layers']}"
                found.append(target(limit, worst[key], length=words, arms=which))
        # All arms share one host pool, which the last arm fills.
        found += _memory_targets(f"Llama, {words}", arms, arms[-1:])
    if "host" in parts:
        found.append(target("layer", parts["host"]["added_per_layer"]))
    if "added_bare" in parts.get("host", {}):
        found.append(target("bare", parts["host"]["added"] / parts["host"]["added_bare"]))
    return found


def _memory_targets(name: str, arms: list[Data], pools: list[Data]) -> list[Data]:
    if not arms:
        return []
    held = max(a["host_bytes"] / a["bytes_offloaded"] for a in pools)
    return [target("r", min(a["r"] for a in arms), model=name), target("pinned", held, model=name)]


def _trainer_targets(data: Data) -> list[Data]:
    found: list[Data] = []
    for row in data["rows"]:
        moved, length = by_method(row)[OURS], f"{row['tokens']} tokens × {data['settings']['batch']}"
        found.append(target("trainer", moved["ratio"], length=length))
        limited = by_method(row).get("budget", {})
        if "budget" in limited:
            found.append(target("budget", limited["ratio"], length=length, gib=limited["budget"]))
        for planned in filter(None, (moved, limited)):
            method = PAGE["names"]["trainer"][planned["method"]]
            for key, what in (("seconds", "forward and backward"), ("peak_bytes", "peak")):
                if key in planned["distance"]:
                    values = {"length": length, "method": method, "what": what}
                    found.append(target("predicted", abs(planned["distance"][key]), **values))
    return found


def _frontier_targets(data: Data) -> list[Data]:
    found: list[Data] = []
    for name, part in data["parts"].items():
        budgets = [a for a in part["arms"] if a["method"] == OURS]
        at_target = next(a for a in budgets if a["budget"] == part["target"])
        found.append(target(name, at_target["ratio"], stack=_stack(part), gib=part["target"]))
        highest = max(a["highest_bytes"] / a["budget"] for a in budgets)
        found.append(target("within", highest, stack=_stack(part), number=len(budgets)))
        for key, what in (("seconds", "step time"), ("peak_bytes", "peak")):
            if plans := [a for a in part["arms"] if a.get("distance")]:
                worst = max(plans, key=lambda a: abs(a["distance"][key]))
                values = {"stack": _stack(part), "what": what, "plan": _plan(worst)}
                found.append(target("predict", abs(worst["distance"][key]), **values))
    return found


def _plan(a: Data) -> str:
    """Name the plan of an arm in words."""
    if a["budget"] is not None:
        return text("plan_of_budget", **a)
    return PAGE["names"]["frontier"]["default"] if a["num_layers"] is None else text("plan_of_layers", **a)


VISIBLE = 1.001  # times a budget: a peak above it differs in the table


def frontier_sections(data: Data) -> list[str]:
    """Return the section of time against peak."""
    names, found = PAGE["names"]["frontier"], [f"## {SECTIONS['frontier']}", text("frontier")]
    if any(a["method"] == "default" for part in data["parts"].values() for a in part["arms"]):
        found.append(text("frontier_default"))
    for part in data["parts"].values():
        rows = []
        order = list(dict.fromkeys(a["method"] for a in part["arms"]))
        for a in sorted(part["arms"], key=lambda a: (order.index(a["method"]), a["budget"] or 0)):
            known = {key: value for key, value in a.items() if value is not None}
            # Only a budget is a limit of the passes that measure; the default also measures what no offload takes.
            highest = a["peak_bytes"] if a["budget"] is None else a["highest_bytes"]
            rows.append({**known, "name": names.get(a["method"], a["method"]), "highest": highest})
        at_target = next(a for a in part["arms"] if a["budget"] == part["target"])
        found += [text("frontier_part", stack=_stack(part)), table("frontier", rows)]
        tried = [(r["highest"] / r["budget"], r["peak_bytes"] / r["budget"]) for r in rows if r.get("budget")]
        over = [highest - 1 for highest, kept in tried if kept <= VISIBLE < highest]
        found += [text("frontier_over", number=len(over), most=max(over))] if over else []
        spread = max(max(of) / min(of) - 1 for of in (a["samples"] for a in part["arms"]))
        found += [text("frontier_noise", **part, spread=spread), f"```text\n{at_target['plan']}\n```"]
        found.append(text("frontier_profile", **part["profile"]))
    return [*found, origin(data)]


def peers_sections(data: Data) -> list[str]:
    """Return the section of other tools."""
    names, rows = PAGE["names"]["peers"], []
    for a in data["arms"]:
        name = names.get(a["method"], a["method"])
        name = names["budget"] if a["budget"] is not None else name
        version = data["versions"].get(a["method"], "")
        known = {key: value for key, value in a.items() if value is not None}
        rows.append({**known, "name": f"{name} ({version})" if version else name})
    missing = [text("left_out", tool=names.get(tool, tool), why=why) for tool, why in data["left_out"].items()]
    free = next(a for a in data["arms"] if a["method"] == OURS and a["budget"] is None)
    return [
        f"## {SECTIONS['peers']}",
        text("peers", **data["settings"], noise=data["noise"]),
        table("peers", rows),
        *([text("peers_free"), f"```text\n{free['plan']}\n```"] if "plan" in free else []),
        *missing,
        origin(data),
    ]


def _stack(part: Data) -> str:
    settings = part["settings"]
    return f"{settings['layers']} {'compiled ' * part['compiled']}layers, {settings['tokens']} tokens"


def memory_sections(data: Data) -> list[str]:
    """Return the section of memory over a step, whose picture is on the first page."""
    return [f"## {SECTIONS['memory']}", text("memory", **data, above=above(data)), origin(data)]


def machine_sections(data: Data) -> list[str]:
    """Return what the command that measures a machine printed."""
    lines = (textwrap.fill(line, 100, subsequent_indent="  ") for line in data["printed"].splitlines())
    return [f"## {SECTIONS['machine']}", text("machine"), "\n".join(["```text", *lines, "```"]), origin(data)]


def trainer_sections(data: Data) -> list[str]:
    """Return the section of the Trainer of Hugging Face."""
    names, rows, plans = PAGE["names"]["trainer"], [], []
    for row in data["rows"]:
        low_high = ({"low": min(a["ratios"]), "high": max(a["ratios"])} for a in row["arms"])
        arms = [{**a, **r, "tokens": row["tokens"]} for a, r in zip(row["arms"], low_high, strict=True)]
        rows += [{**a, "name": names.get(a["method"], a["method"]), "moved": _moved(row, a["method"])} for a in arms]
        plans += [text("plan", **row), f"```text\n{by_method(row)[OURS]['plan']}\n```", *_budget_plan(row)]
    noise = "; ".join(text("trainer_noise", **row) for row in data["rows"])
    return [
        f"## {SECTIONS['trainer']}",
        text("trainer", **data["settings"], noise=noise),
        table("trainer", rows),
        *plans,
        origin(data),
    ]


def _moved(row: Data, method: str) -> str:
    """Return the GiB that a method offloaded: one number, or that of each round."""
    runs = [run[method].get("bytes_offloaded") for run in row["runs"] if method in run]
    shown = [text("gib", nbytes=nbytes) for nbytes in runs if nbytes is not None]
    return shown[0] if len(set(shown)) == 1 else ", ".join(shown)


def _budget_plan(row: Data) -> list[str]:
    """Return the plan for a budget, and how long the host takes to queue a forward with it."""
    arms = by_method(row)
    limited = arms.get("budget", {})
    if "budget" not in limited:
        return []
    plan = f"```text\n{limited['plan']}\n```"
    host = text("trainer_host", **queue_seconds(arms), forward="".join(forward_seconds("trainer_forward", arms)))
    return [text("budget_plan", budget=limited["budget"]), plan, host, *_long_steps(row)]


def _long_steps(row: Data) -> list[str]:
    """Return a sentence about steps with a budget that took much longer than the others of their round, if any did."""
    steps = {
        method: [run[method]["seconds"] for run in row["runs"] if method in run] for method in ("budget", CHECKPOINT)
    }
    long = {method: [s for of in runs for s in of if s > LONG * median(of)] for method, runs in steps.items()}
    if not long["budget"]:
        return []
    counts = {"long": len(long["budget"]), "long_checkpoint": len(long[CHECKPOINT]) or "none"}
    return [text("trainer_long", steps=sum(map(len, steps["budget"])), most=max(long["budget"]), **counts)]


def model_line(data: Data) -> str:
    """Describe linear layers or GPT blocks."""
    batch, length, hidden = data["settings"]["shape"]
    kind = f"{data['settings']['heads']} heads, " if data["settings"]["heads"] else ""
    return f"hidden size {hidden}, {kind}sequence {length}, batch {batch}, {data['settings']['dtype']}"


def layers_sections(name: str, data: Data) -> list[str]:
    """Return the section of linear layers or GPT blocks."""
    line, methods = model_line(data), PAGE["names"]["methods"]
    order = [NOTHING, f"{NOTHING}, again", *methods]
    arms = sorted(data["arms"], key=lambda a: (order.index(a["method"]), a["num_layers"]))
    return [
        f"## {SECTIONS[name]}",
        f"{line[:1].upper()}{line[1:]}.",
        table("comparison", ({**a, "name": methods.get(a["method"], a["method"])} for a in arms)),
        text("layers", **data),
        table("details", ours(data)),
        origin(data),
    ]


def llama_sections(data: Data) -> list[str]:
    """Return the sections of the Llama benchmark."""
    found, parts = [f"## {SECTIONS['llama']}"], data["parts"]
    lengths = {words: parts[name] for name, words in LENGTHS.items() if name in parts}
    for first in list(lengths.values())[:1]:
        found += [text("llama", **first["settings"]), *_saved(first)]
    for words, part in lengths.items():
        found += [f"### {words}", *_length(part)]
    if "host" in parts:
        found += ["### Host time of a layer", *_host(parts["host"])]
    return [*found, origin(data)]


def _saved(part: Data) -> list[str]:
    """Return what autograd saves in one layer."""
    tokens, rows = part["settings"]["tokens"], []
    for s in sorted(part["saved"], key=lambda s: len(s["layers"]) > 1):
        small = s["tensor_nbytes"] < part["settings"]["min_bytes"]
        verdict = "no: small" if small else "once for all layers" if len(s["layers"]) > 1 else "yes"
        rows.append({**s, "sizes": " × ".join(str(size) for size in s["shape"]) or "scalar", "verdict": verdict})
    own = sum(s["nbytes"] for s in part["saved"] if len(s["layers"]) == 1)
    return [text("saved", own=own, tokens=tokens, each=own / tokens / 1024), table("saved", rows)]


def _length(part: Data) -> list[str]:
    """Return text and tables of one number of tokens."""
    arms, rounds, timelines = ours(part), {}, part["timelines"]
    for a in arms:
        rounds.setdefault((a["compute"]["forward"], a["compute"]["backward"]), []).append(a)
    words = [text("round", arms=numbers(a), forward=f, backward=b, both=f + b) for (f, b), a in rounds.items()]
    many = " or ".join(str(n) for n in sorted({len(a["samples"]) for a in part["arms"]}, reverse=True))
    rows = [arm(part, NOTHING, 0) or {}, *({**a, "fit": "yes" if a["fits"] else "no"} for a in arms)]
    found = [text("length", **part, rounds="; ".join(words), many=many), table("length", rows)]
    calls = ", ".join(f"{count} × {name}" for name, count in part["driver_calls"].items() if count)
    if part["driver_calls"]:
        found.append(text("driver", calls=calls) if calls else text("no_driver"))
    stalls = [{key: sum(s[key] for s in t["stalls"]) for key in ("forward", "backward")} for t in timelines]
    return [*found, table("timelines", ({**t, **s} for t, s in zip(timelines, stalls, strict=True)))]


def _host(part: Data) -> list[str]:
    """Return text and table of the host time of Llama layers."""
    words = text("host", **part, paused=part["added_paused"] / part["settings"]["layers"])
    if "added_bare" in part:
        added, times = part["added_bare"] / part["num_layers"], part["added"] / part["added_bare"]
        words += text("bare", **part, bare=added, times=times)
        words += (text("quartiles", quartiles=part["ratio_quartiles"]) if "ratio" in part else "") + "."
    rows = ({**t, "name": PAGE["names"]["host"][case], "both": sum(t.values())} for case, t in part["host"].items())
    calls = [(PAGE["names"]["host"][arm], row) for arm, found in part["calls"].items() for row in found]
    timed = ({**row, "arm": arm, "step": row["count"] * row["seconds"]} for arm, row in calls)
    return [words, table("host", rows), text("calls"), table("calls", timed)]


def report(results: dict[str, Data]) -> str:
    """Return the tables of both pages as Markdown."""
    return readers_page(results) + developers_page(results)


def readers_page(results: dict[str, Data]) -> str:
    """Return what a reader wants to compare: time against peak, other tools, the Trainer, several GPUs."""
    sections = {"frontier": frontier_sections, "memory": memory_sections, "peers": peers_sections}
    sections |= {"trainer": trainer_sections, "parallelism": parallelism_page.sections}
    sections |= {"pipelines": pipelines_sections, "machine": machine_sections}
    parts = [part for name, of in sections.items() if name in results for part in of(results[name])]
    return "\n\n".join([WRITTEN, *(parts or ["No results are recorded yet."])]) + "\n"


def developers_page(results: dict[str, Data]) -> str:
    """Return targets, and time by number of layers and of the host."""
    parts = [WRITTEN, "## Targets", table("targets", targets(results))]
    for name in ("gpt", "linear"):
        parts += layers_sections(name, results[name]) if name in results else []
    parts += llama_sections(results["llama"]) if "llama" in results else []
    if "overhead" in results:
        parts += [
            f"## {SECTIONS['overhead']}",
            table("overhead", results["overhead"]["cases"]),
            origin(results["overhead"]),
        ]
    return "\n\n".join(parts) + "\n"


def notes(*names: str, folder: Path = RESULTS) -> str:
    """Return which of these results, or of all, were measured with other sources of the library; empty if none were."""
    found = load(folder).items()
    sections = [
        SECTIONS[name] for name, data in found if name in (names or SECTIONS) and data["source_digest"] != digest()
    ]
    return text("changed", sections="; ".join(sections)) if sections else ""


def load(folder: Path) -> dict[str, Data]:
    """Read all results of a folder."""
    found = {name: read(folder, name) for name in SECTIONS}
    return {name: data for name, data in found.items() if data is not None}


def main(arguments: list[str]) -> int:
    """Write the report, or check it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--check", action="store_true", help="compare the pages instead of writing them")
    options = parser.parse_args(arguments)
    results = load(options.results)
    folder = options.results
    written = {folder / "report.md": readers_page(results), folder / "development.md": developers_page(results)}
    if options.results == RESULTS:
        written[README] = readme(README.read_text(encoding="utf-8"), headline())
    if options.check:
        wrong = [p.name for p, words in written.items() if not p.is_file() or p.read_text(encoding="utf-8") != words]
        for name in wrong:
            print(f"{name} is not what the results give; run python benchmarks/report.py")
        print(notes(folder=options.results) or "All results were measured with the present sources of the library.")
        return 1 if wrong else 0
    for path, words in written.items():
        path.write_text(words, encoding="utf-8")
    if results:
        import hero
        from picture import draw

        draw(results, options.results)
        hero.draw(results, options.results)
    print(headline(options.results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
