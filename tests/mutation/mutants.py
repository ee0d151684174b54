"""What the mutation check breaks: the statements and conditions that carry a tag in the source.

A tag is a comment at the end of a line, or alone on the line above; several tags may stand above one line.

======================  ===========================================================================================
tag                     what the mutant does
======================  ===========================================================================================
``[wait: NAME]``        leaves the statement out
``[keep: NAME]``        replaces the statement by the one in `INSTEAD`
``[guard: NAME]``       replaces by what `INSTEAD` has: the condition of an ``if`` or ``while``, else the statement
``[guard: NAME]``       without an entry there: drops a line of an ``and`` or ``or``, makes the condition of an
                        ``if`` or ``while`` false, leaves any other statement out
``[guard: N -> True]``  sets the condition, the value of an assignment or the returned value to True
``[guard: N -> False]`` sets it to False
``[guard: N -> removed]``  leaves the whole statement out
======================  ===========================================================================================
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

TAG = re.compile(r"# \[(wait|keep|guard): ([^\]]+?)(?: -> (True|False|removed))?\]")
CALL = re.compile(r"(\.wait|\.wait_stream|\.join|\.use|\border_behind|\bbegin_reload)\(")
WEAK = "__import__('weakref').proxy({})"


@dataclass(frozen=True)
class Mutant:
    """One change to one file."""

    name: str  # the tag, without its brackets
    path: str  # relative to `src`
    line: int  # of the tag, from 1
    text: str  # the changed content of the file


# What replaces a tagged statement, or the condition of a tagged ``if``.
INSTEAD: dict[str, str] = {
    "keep: kept tensor": "alias = tensor.detach(); alias.data = torch.empty(0, dtype=tensor.dtype)",
    "keep: host copy": f"self.version = version_of(self.probe); self.storage = {WEAK.format('self.storage')}",
    "keep: resident tensor": (
        "self.version = version_of(self.probe); self.probe = self.probe.detach(); "
        "self.probe.data = torch.empty(0, dtype=self.probe.dtype)"
    ),
    "keep: pass of a tensor": f"self.version = version_of(self.probe); self.owner = {WEAK.format('self.owner')}",
    "keep: address of the storage": "weak = None",
    "keep: address of a marked storage": ("kept.add(storage, __import__('types').SimpleNamespace(expired=False))"),
    "keep: address of a final storage": (
        "note = __import__('types').SimpleNamespace(expired=False, version=version_of(tensor), ready=ready, "
        "whole=offload_base_tensor, wrappers=wrappers)"
    ),
    "keep: host memory": (
        "return HostBuffer(nbytes, __import__('weakparts').WeakParts(parts), start, size, self._fence)"
    ),
    "guard: fences waited for": "self.link.waited = position.order + 1000",
    "guard: fence of a returned buffer": "buffer.fence = None",
    "guard: streams that waited": "self._users = (*self._users, current); self.resources.in_flight = None",
    "guard: end of a dropped copy": "end = device.transfers.position(device.transfers.back)",
    "guard: view that the host copy lacks": "return layer.eager",
    "guard: gaps of earlier copies": "self.covered = union((*self.covered, *(view.extent for view in new)))",
    "guard: wait for each device and stream": "position is not None and not waited",
    "guard: limit on the bytes held": "limit is not None and self.bytes_taken + more > limit",
    "guard: largest element": "LARGEST_ELEMENT = 4",
    "guard: time of one step": "return time.perf_counter() - begun",
    "guard: first entry that means a module": "meant[name] = kind",
    "guard: last group of a kind": "may = [k for k in places if k < last]",
    "guard: groups in flight": "window = resident",
}


def tagged(source: Path) -> Iterator[Mutant]:
    """Yield a mutant for every tag.

    Raises
    ------
    LookupError
        If `INSTEAD` lacks the replacement of a ``keep``, or has one for a tag that does not exist.
    """
    unused = set(INSTEAD)
    for path in sorted(source.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree, lines = ast.parse(text), text.splitlines()
        for number, line in enumerate(lines, 1):
            tag = TAG.search(line)
            if tag is None:
                continue
            name = f"{tag[1]}: {tag[2]}"
            unused.discard(name)
            place = number
            while lines[place - 1].lstrip().startswith("#"):  # the tag of the first line of code below
                place += 1
            if tag[1] == "keep" and name not in INSTEAD:
                raise LookupError(f"INSTEAD has no replacement for [{name}] of {path.name}.")
            changed = _broken(text, tree, place, tag[1], INSTEAD.get(name), tag[3])
            yield Mutant(name, str(path.relative_to(source)), number, changed)
    if unused:
        raise LookupError(f"INSTEAD has replacements for tags that no source has: {', '.join(sorted(unused))}.")


def _broken(text: str, tree: ast.AST, line: int, kind: str, instead: str | None, way: str | None) -> str:
    """Return the source with the tagged part of a line replaced."""
    statement = _statement(tree, line)
    if kind in ("wait", "keep") or way == "removed":
        return _replaced(text, statement, instead or "pass")
    if way is None and instead is None:
        for operation in ast.walk(statement):
            if isinstance(operation, ast.BoolOp):
                for operand in operation.values:
                    if operand.lineno == line == operand.end_lineno and operation.lineno < operation.end_lineno:
                        return _replaced(text, operand, str(isinstance(operation.op, ast.And)))
    if isinstance(statement, (ast.If, ast.While)):
        return _replaced(text, statement.test, instead or way or "False")
    if instead is not None:
        return _replaced(text, statement, instead)
    if way is None:
        return _replaced(text, statement, "pass")
    choices = [node for node in ast.walk(statement) if isinstance(node, ast.IfExp) and node.lineno == line]
    value = choices[0].test if choices else getattr(statement, "value", None)
    if value is None:
        raise LookupError(f"Line {line} has neither a condition nor a value that could be {way}.")
    return _replaced(text, value, way)


def _statement(tree: ast.AST, line: int) -> ast.stmt:
    """Return the innermost statement that covers a line."""
    found = [
        node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return max(found, key=lambda node: (node.lineno, node.col_offset))


def _replaced(text: str, node: ast.stmt | ast.expr, instead: str) -> str:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = text.splitlines(keepends=True)
    first, last = lines[node.lineno - 1].encode(), lines[node.end_lineno - 1].encode()
    middle = first[: node.col_offset].decode() + instead + last[node.end_col_offset :].decode()
    return "".join([*lines[: node.lineno - 1], middle, *lines[node.end_lineno :]])


def untagged(source: Path) -> list[str]:
    """Return the calls in the engine that wait and have no tag, as ``file:line: text``."""
    found = []
    for path in sorted((source / "actoffload" / "engine").glob("*.py")):
        lines = ["", *path.read_text(encoding="utf-8").splitlines()]
        for number, (above, line) in enumerate(pairwise(lines), 1):
            code = line.split("#")[0]
            waits = CALL.search(code) and not re.search(r"\bdef |[\"']\.join\(", code)
            if waits and TAG.search(line) is None and not (above.lstrip().startswith("#") and TAG.search(above)):
                found.append(f"{path.name}:{number}: {line.strip()}")
    return found
