"""Write tables, headline and pictures of the results; no figure of them is typed by hand.

python benchmarks/report.py --add build/bench/samples.jsonl    takes recorded jobs over into the results, and writes
python benchmarks/report.py                                    writes
python benchmarks/report.py --check                            fails if what is written is not that of the results
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pictures
import rows
from jobs import ARMS, JOBS
from rows import RESULTS, Row

README = rows.ROOT / "README.md"
MARKS = "<!-- headline: written by benchmarks/report.py -->\n", "<!-- headline ends -->"
WRITTEN = "<!-- Written by benchmarks/report.py from the results beside it; do not edit. -->"
COLUMNS = 88  # of a line that a page shows without scrolling
ORIGIN = "<!-- origin -->"
CELLS = {
    "step (ms)": lambda row, _: number(row, "step_ms", 1) + spread(row, "step_ms", 1) or row["status"],
    "× no offload": lambda row, _: number(row, "ratio", 3) + spread(row, "ratio", 3),
    "× checkpointing": lambda row, of_job: by_checkpoint(row, of_job),
    "peak (GiB)": lambda row, _: number(row, "peak_gib", 2),
}
DETAILS = {
    "kernels (ms)": lambda row, _: number(row, "kernel_ms", 1),
    "host, forward (ms)": lambda row, _: number(row, "host_forward_ms", 1),
    "passes": lambda row, _: row["passes"],
    "start-up (s)": lambda row, _: number(row, "startup_s", 1),
    "peak predicted": lambda row, _: apart(row, "predicted_peak_gib", "peak_gib"),
    "pass predicted": lambda row, _: apart(row, "predicted_pass_ms", "pass_ms"),
}
"""Columns of a job's two tables; columns and rows of the second one without any value are left out."""


def number(row: Row, column: str, places: int) -> str:
    return f"{float(row[column]):.{places}f}" if row[column] else ""


def spread(row: Row, column: str, places: int) -> str:
    """Return the extremes of a value in parentheses, if they differ."""
    low, high = (number(row, f"{column}_{end}", places) for end in ("low", "high"))
    return "" if low == high else f" ({low} to {high})"


def apart(row: Row, predicted: str, measured: str) -> str:
    """Return by how much a prediction differs from what was measured."""
    return f"{100 * (float(row[predicted]) / float(row[measured]) - 1):+.1f} %" if row[predicted] else ""


def by_checkpoint(row: Row, of_job: Sequence[Row]) -> str:
    """Return the step time as a ratio to that of checkpointing, if both were measured in one run."""
    other = find(of_job, "checkpoint")
    if other is None or row["arm"] in ("none", "none2", "checkpoint") or row["commit"] != other["commit"]:
        return ""
    return f"{float(row['step_ms']) / float(other['step_ms']):.3f}" if row["step_ms"] and other["step_ms"] else ""


def find(found: Iterable[Row], arm: str) -> Row | None:
    return next((row for row in found if row["arm"] == arm), None)


def name_of(arm: str) -> str:
    name, _, gib = arm.partition(":")
    return f"{ARMS[name]} of {float(gib):g} GiB" if gib else ARMS[name]


def by_job(results: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each job, in the order of the page."""
    found: dict[str, list[Row]] = {}
    for name, job in JOBS.items():
        places = {arm: place for place, arm in enumerate(job.arms)}
        of_job = [row for row in results if row["job"] == name]
        if of_job:
            found[name] = sorted(of_job, key=lambda row: places.get(row["arm"], len(places)))
    return found


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, whose first column is aligned to the left."""
    marks = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, marks, *lines))


def job_table(columns: dict[str, Callable[..., str]], of_job: Sequence[Row]) -> str:
    """Return a table of a job, without empty columns; empty if there is nothing to show."""
    cells = {title: [cell(row, of_job) for row in of_job] for title, cell in columns.items()}
    cells = {title: column for title, column in cells.items() if any(column)}
    lines = [[name_of(row["arm"]), *(column[k] for column in cells.values())] for k, row in enumerate(of_job)]
    return table(["method", *cells], [line for line in lines if any(line[1:])]) if cells else ""


def rank_table(of_job: Sequence[Row]) -> str:
    """Return the drop of the peak of each rank beside that of the plan; empty if no row has them."""
    lines, nothing = list[list[str]](), find(of_job, "none")
    for row in of_job if nothing is not None else ():
        columns = nothing["rank_peaks_gib"], row["rank_peaks_gib"], row["rank_drops_gib"]
        for rank, values in enumerate(zip(*(column.split() for column in columns), strict=False)):
            without, peak, planned = map(float, values)
            drop = without - peak
            cells = [f"{without:.2f}", f"{peak:.2f}", f"{drop:.3f}", f"{planned:.3f}"]
            lines += [[name_of(row["arm"]), str(rank), *cells, f"{100 * drop / planned:.2f} %"]] if planned else []
    header = ["method", "rank", "peak without (GiB)", "with", "drop", "drop of the plan", "drop / drop of the plan"]
    return table(header, lines) if lines else ""


def link_table(folder: Path) -> str:
    """Return the section of the rates of copies of each GPU, alone and with all GPUs copying, if they were measured."""
    if not (folder / "links.json").is_file():
        return ""
    links = json.loads((folder / "links.json").read_text(encoding="utf-8"))
    keys = "d2h_alone", "d2h", "h2d_alone", "h2d"
    lines = [[str(rank["rank"]), *(f"{rank[key] / 1e9:.1f}" for key in keys)] for rank in links["ranks"]]
    header = ["GPU", "to the host, alone (GB/s)", "all at once", "to the device, alone", "all at once"]
    return "\n\n".join(["## Copies of all GPUs of a host", table(header, lines), origin([links])])


def notes(of_job: Sequence[Row]) -> list[str]:
    """Return what rows say about themselves, each sentence once, with the arms that say it if not all do."""
    said: dict[str, list[str]] = {}
    for row in of_job:
        for sentence in filter(None, re.split(r"(?<=\.) ", row["note"])):
            said.setdefault(sentence, []).append(name_of(row["arm"]))
    return [note if len(arms) == len(of_job) else f"{'; '.join(arms)}: {note}" for note, arms in said.items()]


def origin(of_job: Sequence[Row]) -> str:
    """Return a sentence about where, when and of which commit a job was measured, and one for arms of others."""
    row = max(of_job, key=lambda each: each["date"])
    versions = ", ".join(f"{name} {row[name]}" for name in ("driver", "torch", "transformers") if row.get(name))
    found = f"Recorded on {row['date'][:10]} from commit `{row['commit'][:12]}`: {row['device']}, {versions}."
    others: dict[tuple[str, str], dict[str, None]] = {}
    for each in of_job:
        if each["commit"] != row["commit"]:
            others.setdefault((each["date"][:10], each["commit"][:12]), {})[name_of(each["arm"])] = None
    return found + "".join(f" {'; '.join(arms)}: {date}, `{commit}`." for (date, commit), arms in others.items())


def section(name: str, of_job: Sequence[Row]) -> str:
    """Return the section of a job."""
    shown = search_tables(of_job) if JOBS[name].searches else [job_table(CELLS, of_job), rank_table(of_job)]
    parts = [f"## {JOBS[name].title}", JOBS[name].words, *filter(None, shown)]
    details = "" if JOBS[name].searches else job_table(DETAILS, of_job)
    if details:
        parts += ["<details><summary>Kernels, host, first passes and predictions</summary>", details, "</details>"]
    return "\n\n".join([*parts, " ".join([*notes(of_job), origin(of_job)])])


def searched(found: Iterable[Row]) -> dict[str, int]:
    """Return the longest sequence that trains, by arm that was tried; 0 if none does."""
    longest: dict[str, int] = {}
    for row in found:
        tokens = int(row["tokens"]) if row["status"] == "ok" else 0
        longest[row["arm"]] = max(longest.get(row["arm"], 0), tokens)
    return longest


def search_tables(found: Sequence[Row]) -> list[str]:
    """Return the longest sequences that train and their step times, and the same by memory."""
    lines, arms = [], list(dict.fromkeys(row["arm"] for row in found))
    whole = [row for row in found if not row["memory_gb"]]
    for arm, tokens in filter(all, searched(whole).items()):  # of those with which any length trains
        row = next(row for row in whole if (row["arm"], row["tokens"]) == (arm, str(tokens)))
        seconds, peak = float(row["step_ms"]) / 1e3, number(row, "peak_gib", 2)
        lines.append([name_of(arm), f"{tokens:,}", f"{seconds:.1f}", f"{tokens / seconds:,.0f}", peak])
    shown = [table(["method", "longest (tokens)", "step (s)", "tokens / s", "peak (GiB)"], lines)] if lines else []
    if levels := sorted({float(row["memory_gb"]) for row in found if row["memory_gb"]}):
        by_level = [searched(row for row in found if row["memory_gb"] == f"{level:g}") for level in levels]
        both = zip(levels, by_level, strict=True)
        lines = [[f"{gb:g} GB", *(f"{most[arm]:,}" if arm in most else "" for arm in arms)] for gb, most in both]
        shown += ["Longest sequence in tokens, by memory:", table(["memory", *map(name_of, arms)], lines)]
    return shown


def overview(jobs: dict[str, list[Row]]) -> str:
    """Return one line a job: no offload, checkpointing, and ours at about its peak."""
    lines = []
    for name, of_job in jobs.items():
        ours = pictures.ours(of_job)
        if not JOBS[name].searches and ours is not None and find(of_job, "none") and find(of_job, "checkpoint"):
            shown = []
            for row in filter(None, (find(of_job, "none"), find(of_job, "checkpoint"), ours)):
                measured = f"{number(row, 'step_ms', 0)} ms, {number(row, 'peak_gib', 1)} GiB"
                shown.append(measured if row["step_ms"] else row["status"])
            lines.append([JOBS[name].title, *shown, by_checkpoint(ours, of_job)])
    header = ["job", "no offload", "checkpointing", "actoffload", "× checkpointing"]
    return table(header, lines)


def page(results: Sequence[Row], folder: Path) -> str:
    """Return the text of the page below its introduction."""
    jobs = by_job(results)
    parts = [WRITTEN, overview(jobs)]
    for name, of_job in jobs.items():
        parts.append(section(name, of_job))
        if name == "B8":
            parts += [f"![{pictures.BUDGETS}](budgets-{scheme}.png){{.only-{scheme}}}" for scheme in pictures.INK]
    machine = folder / "machine.txt"
    if machine.is_file():
        when, _, printed = machine.read_text(encoding="utf-8").partition("\n\n")
        lines = f"```text\n{wrapped(printed.rstrip())}\n```"
        parts += ["## The machine", "What `python -m actoffload` prints:", lines, f"Measured on {when}."]
    return "\n\n".join(filter(None, [*parts, link_table(folder)])) + "\n"


# The landing page and README.md


def headline(results: Sequence[Row]) -> str:
    """Return what a visitor reads first: at most three sentences with numbers, and their origin."""
    jobs = by_job(results)
    said = list(filter(None, (_trains(jobs), _faster(jobs))))
    same = {row["same_bits"] for row in jobs.get("bits", ()) if row["arm"] in ("none2", "offload", "budget")}
    said += ["**Same bits.** Losses equal those without offload."] if same == {"yes"} else []
    if not said:
        return "No results are recorded yet."
    shown = [jobs[name] for name in pictures.shown(jobs)]
    bases = "none", "checkpoint"
    used = [row for of_job in shown for row in of_job if row["arm"] in bases or row is pictures.ours(of_job)]
    devices = sorted({row["device"].removeprefix("NVIDIA ").split()[0] for row in used})
    days = sorted({row["date"][:10] for row in used})
    busy = " Another GPU of the host was busy." * any("busy" in row["note"] for row in used)
    recorded = f"Recorded on {', '.join(devices)}, {' to '.join(sorted({*days[:1], *days[-1:]}))}.{busy}"
    bars = pictures.bars(jobs, pictures.measured_jobs(jobs))
    others = [f"{title}, {ratio:.2f} ×" for title, ratio, *_ in bars if round(ratio, 2) >= 1]
    if others:
        recorded = f"Not faster than checkpointing: {'; '.join(others)}.\n{recorded}"
    if any(without is None for *_, without, _ in pictures.bars(jobs)):
        recorded = f"Jobs that do not fit without offload use all memory of the GPU.\n{recorded}"
    return "\n".join([*(f"- {sentence}" for sentence in said), "", ORIGIN, recorded * bool(used)]).rstrip()


def _trains(jobs: dict[str, list[Row]]) -> str:
    longest = searched(row for row in jobs.get("context", []) if not row["memory_gb"])
    if "offload" not in longest:
        return ""
    tokens = {arm: f"{number // 1024}k" for arm, number in longest.items()}
    said = f"**Trains what does not fit.** Llama 8B LoRA: {tokens['offload']} tokens"
    how = {"none": "with no offload", "checkpoint": "with checkpointing", "checkpoint_offload": "if it offloads inputs"}
    return f"{', '.join([said, *(f'{tokens[arm]} {text}' for arm, text in how.items() if arm in tokens)])}."


def _faster(jobs: dict[str, list[Row]]) -> str:
    ratios = [bar[1] for bar in pictures.bars(jobs)]
    if not ratios:
        return ""
    wins, extremes = sum(round(r, 2) < 1 for r in ratios), f"{min(ratios):.2f} to {max(ratios):.2f} × its step time"
    return f"**Faster than checkpointing** in {wins} of {len(ratios)} jobs, at its memory where both fit: {extremes}."


def readme(text: str, sentences: str) -> str:
    """Return the text of README.md with the headline between its two marks."""
    before, mark, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    wrap = partial(textwrap.fill, width=120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return before + mark + "\n".join(map(wrap, sentences.split("\n"))) + "\n" + end + after


def add(paths: Sequence[Path], folder: Path) -> None:
    """Take over recorded jobs, and what lies beside them: the machine, overlap, links, the report of a budget."""
    results = rows.read(folder / "results.csv")
    for path in paths:
        samples = rows.samples_of(path)
        found = rows.summarize(samples)
        reference = [row["job"] for row in found if row["device"].startswith("reference")]
        if reference or not found:
            raise SystemExit(f"{path.name} has rows of the reference device: {', '.join(dict.fromkeys(reference))}.")
        results = rows.merge(results, found)
        reports = [s for s in samples if (s["job"], s["arm"]) == ("T1", "budget") and "report" in s]
        if reports:
            said = origin([row for row in found if row["job"] == "T1"])
            (folder / "report-of-a-budget.txt").write_text(f"{wrapped(reports[-1]['report'])}\n\n{said}\n", "utf-8")
        for name in ("machine.txt", "overlap.json", "links.json"):
            if (path.parent / name).is_file():
                shutil.copyfile(path.parent / name, folder / name)
    rows.write(folder / "results.csv", results)


def wrapped(report: str) -> str:
    """Wrap the lines of a report that are no lines of a table."""
    blocks = report.split("\n\n")
    fill = lambda line: textwrap.fill(line, COLUMNS, subsequent_indent="  ")  # noqa: E731
    return "\n\n".join(b if "\n---" in b else "\n".join(map(fill, b.splitlines())) for b in blocks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check; return 1 if something written is not that of the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="SAMPLES", help="take recorded jobs over")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--readme", type=Path, default=README, help="file with the headline")
    options = parser.parse_args(arguments)
    folder: Path = options.results
    if options.add:
        add(options.add, folder)
    results = rows.read(folder / "results.csv")
    words = headline(results)
    texts: dict[Path, Any] = {
        folder / "report.md": page(results, folder),
        folder / "headline.md": f"{words}\n",
        options.readme: readme(options.readme.read_text(encoding="utf-8"), words),
    }
    drawn = folder / "pictures.json"  # of what the pictures were drawn
    texts[drawn] = json.dumps(pictures.drawn_from(by_job(results)), indent=1) + "\n"
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text("utf-8") != text]
    if options.check:
        print("\n".join(f"{path.name} is not that of the results; run benchmarks/report.py." for path in stale))
        return 1 if stale else 0
    if drawn in stale:
        pictures.draw(by_job(results), folder)
    for path in stale:
        path.write_text(texts[path], encoding="utf-8")
    print(f"wrote {', '.join(path.name for path in stale) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
