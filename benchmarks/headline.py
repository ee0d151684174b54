"""The table and the captions of the landing page and of README.md, and a report that a page shows."""

from __future__ import annotations

import textwrap
from functools import partial
from pathlib import Path

from page import PAGE, Data, before_default, origin, table, text
from results_file import RESULTS, read

NOTHING, OURS, CHECKPOINT = "no offload", "actoffload", "checkpoint"
COLUMNS = 88  # of a line that a page shows without scrolling


def headline(folder: Path = RESULTS) -> str:
    """Return table and captions of the landing page: what `offload(model)` and a budget cost and save."""
    results = {name: read(folder, name) for name in ("trainer", "peers", "memory")}
    found = {name: data for name, data in results.items() if data is not None and not data["device"]["reference"]}
    of = {"trainer": _trainer_arms, "peers": _peers_arms}
    models = {name: arms(found[name]) for name, arms in of.items() if name in found}
    if not models:
        return "No GPU results are recorded yet."
    names = {NOTHING: NOTHING, **PAGE["names"]["trainer"]}
    rows = [
        {"name": name, **{model: arms[method] for model, arms in models.items() if method in arms}}
        for method, name in names.items()
    ]
    devices = {PAGE["names"]["headline"][name]: found[name]["device"]["name"] for name in models}
    first = text("headline", device=next(iter(devices.values())))
    if len(set(devices.values())) > 1:
        each = [text("headline_device", what=what, device=device) for what, device in devices.items()]
        first = text("headline_apart", devices=" and ".join(each))
    old = next((found[name] for name in models if before_default(found[name])), None)
    if old is not None:
        first = text("headline_before", line=first.removesuffix(":"), sources=old["source_digest"][:12])
    words = [text(f"headline_{name}", **_settings(name, found[name])) for name in models]
    words += [text("headline_beside")] if any("beside" in found[name] for name in models) else []
    words += _calls(models)
    if "memory" in found:
        words.append(text("memory_caption", **found["memory"], day=found["memory"]["date"][:10]))
    return "\n\n".join([first, table("headline", rows), " ".join(words)])


def _calls(models: dict[str, dict[str, Data]]) -> list[str]:
    """Return sentences about `offload(model)`, the budgets of the table, and a host that delays one of them."""
    words = [text("headline_fits")]
    limited = [a for a in models.values() if "budget" in a]
    shares = {text("percent", share=a["budget"]["budget"] / a[CHECKPOINT]["peak_bytes"] - 1) for a in limited}
    words += [text("headline_budget", above=" and ".join(sorted(shares)))] if shares else []
    trainer = models.get("trainer", {})
    if "budget" in trainer and trainer["budget"]["ratio"] > trainer[CHECKPOINT]["ratio"]:
        words.append(text("headline_host", **queue_seconds(trainer)))
    return words


def report_of_a_budget(folder: Path = RESULTS) -> str:
    """Return the report of the Trainer's last round with a budget, and what it was recorded on."""
    data = read(folder, "trainer")
    arms = {} if data is None else data["rows"][0]["runs"][-1]
    if data is None or "budget" not in arms:
        return "No report is recorded yet."
    blocks = arms["budget"]["report"].split("\n\n")
    wrapped = [block if "\n---" in block else "\n".join(map(_wrapped, block.splitlines())) for block in blocks]
    shown = "\n\n".join(wrapped)
    return f"```text\n{shown}\n```\n\n{origin(data)}"


def _wrapped(line: str) -> str:
    """Wrap a line of a report that is no line of a table."""
    return textwrap.fill(line, COLUMNS, subsequent_indent=" " * (2 if line.startswith("- ") else 13))


def readme(text: str, sentences: str) -> str:
    """Return the text of README.md with the table and the captions of the landing page between its two marks."""
    before, mark, rest = text.partition("<!-- headline: written by benchmarks/report.py -->\n")
    _, end, after = rest.partition("<!-- headline ends -->")
    wrap = partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)
    parts = (part if part.startswith("|") else wrap(part) for part in sentences.split("\n\n"))
    return before + mark + "\n\n".join(parts) + "\n" + end + after


def _settings(name: str, data: Data) -> Data:
    """Return the sizes of the model of a headline."""
    settings: Data = data["settings"]
    return {**settings, "tokens": data["rows"][0]["tokens"]} if name == "trainer" else settings


def _trainer_arms(data: Data) -> dict[str, Data]:
    """Return the ways to train with the longest sequences, by name."""
    return _as_ratios(by_method(data["rows"][0]))


def _peers_arms(data: Data) -> dict[str, Data]:
    """Return the same ways for the stack that is also run with other tools."""
    of_budget = {a["method"] if a["budget"] is None else "budget": a for a in data["arms"]}
    return _as_ratios({name: a for name, a in of_budget.items() if name in (NOTHING, OURS, "budget", CHECKPOINT)})


def _as_ratios(arms: dict[str, Data]) -> dict[str, Data]:
    """Return the arms with the first one without offload as 1.0: ratios are to the mean of both of these."""
    return arms | {NOTHING: {**arms[NOTHING], "ratio": 1.0}}


def queue_seconds(arms: dict[str, Data]) -> Data:
    """Return how long the host takes to queue a forward of the Trainer, in seconds."""
    names = {"queue": "budget", "queue_none": NOTHING, "queue_checkpoint": CHECKPOINT}
    return {name: arms[method]["queue_seconds"] for name, method in names.items()}


def forward_seconds(name: str, arms: dict[str, Data]) -> list[str]:
    """Return a sentence about the time of a forward on the GPU, if it was measured and the host takes longer."""
    seconds = arms[NOTHING].get("forward_seconds")
    # Where the host is slower than the GPU without offloading too, the time between the events is that of the host.
    slower = seconds is not None and arms[NOTHING]["queue_seconds"] < seconds < arms["budget"]["queue_seconds"]
    return [text(name, forward=seconds)] if slower else []


def by_method(row: Data) -> dict[str, Data]:
    """Return the arms of the Trainer at one length, by the name of each."""
    return {a["method"]: a for a in row["arms"]}


def above(data: Data) -> float:
    """Return by which part of the peak with checkpointing the budget of a step is larger."""
    return float(data["budget"] / data["arms"][CHECKPOINT]["peak_bytes"] - 1)
