"""What the mutation check breaks: every tagged line of the source, and conditions from a table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

__all__ = ["CONDITIONS", "KEPT_BY", "Mutant", "conditions", "tagged", "untagged"]

TAG = re.compile(r"# \[(wait|keep): ([^\]]+)\]")
CALL = re.compile(r"(\.wait|\.join|\.use|\border_behind|\bbegin_reload)\(")
WEAK = "__import__('weakref').proxy({})"


@dataclass(frozen=True)
class Mutant:
    """One change to one file.

    Parameters
    ----------
    name : str
        What is broken.
    path : str
        The file, from `src` on.
    line : int
        Where, from 1.
    text : str
        The whole changed file.
    """

    name: str
    path: str
    line: int
    text: str


# What takes the place of a line that keeps memory, so that it does not any more.
KEPT_BY: dict[str, str] = {
    "kept tensor": "alias = tensor.detach(); alias.data = torch.empty(0, dtype=tensor.dtype)",
    "host copy": f"self.storage = {WEAK.format('storage')}",
    "pass of the graph": f"self.owner = {WEAK.format('owner')}",
    "resident tensor": "self.probe = probe.detach(); self.probe.data = torch.empty(0, dtype=probe.dtype)",
    "source until copied": "self._source: torch.UntypedStorage | None = None",
    "address of the storage": "self.weak = None",
    "address of a marked storage": "kept[storage._cdata] = __import__('types').SimpleNamespace(expired=False)",
    "address of a final storage": (
        "note = Final(__import__('types').SimpleNamespace(expired=False), tensor._version, event, captured, whole)"
    ),
    "host memory": "self.parts = __import__('weakparts').WeakParts(parts)",
}

# (name, file, what stands there once, what takes its place)
CONDITIONS: list[tuple[str, str, str, str]] = [
    (
        "a moved tensor may be edited in place",
        "actoffload/engine/pack.py",
        "if self.probe._version != self.version:",
        "if False:",
    ),
    (
        "a kept tensor may be edited in place",
        "actoffload/engine/pack.py",
        "if alias._version != version:",
        "if False:",
    ),
    (
        "a copy of an older version serves",
        "actoffload/engine/registry.py",
        "if storage.version != version or storage.where is Residency.RELOADED:",
        "if storage.where is Residency.RELOADED:",
    ),
    (
        "a storage that is back is saved again",
        "actoffload/engine/registry.py",
        "if storage.version != version or storage.where is Residency.RELOADED:",
        "if storage.version != version:",
    ),
    (
        "a host copy serves views that it lacks",
        "actoffload/engine/registry.py",
        "(layer.eager and storage.holds(view))",
        "layer.eager",
    ),
    (
        "a tensor that was edited since is taken for the first one",
        "actoffload/engine/registry.py",
        "or first.version != tensor._version",
        "or False",
    ),
    (
        "a tensor with another version counter is taken for the first one",
        "actoffload/engine/registry.py",
        "or storage.root() is not (tensor if base is None else base)",
        "or False",
    ),
    (
        "a tensor that lies otherwise is taken for the first one",
        "actoffload/engine/registry.py",
        "or View.of(tensor) != first.view",
        "or False",
    ),
    (
        "released while another layer holds it",
        "actoffload/engine/storage.py",
        "            or (len(self.layers) > 1 and not all(self.layers.values()))\n",
        "",
    ),
    (
        "aliases are not hollowed",
        "actoffload/engine/storage.py",
        "        for probe in self._probes:\n            drop_data(probe)\n",
        "",
    ),
    (
        "host memory comes back without its fence",
        "actoffload/engine/storage.py",
        "fence = () if self._arrived is None else (self._arrived,)",
        "fence = ()",
    ),
    (
        "one wait for a fence counts for later ones",
        "actoffload/engine/transfer.py",
        "self._waited = mark.order",
        "self._waited = mark.order + 1000",
    ),
    (
        "the pool forgets fences",
        "actoffload/engine/hostpool.py",
        "buffer.fence = fence\n",
        "buffer.fence = ()\n",
    ),
    (
        "dissolving a bin forgets fences",
        "actoffload/engine/hostpool.py",
        "segment._replace(fence=buffer.fence)",
        "segment._replace(fence=())",
    ),
    (
        "joined segments forget the fence behind",
        "actoffload/engine/hostpool.py",
        "latest_positions((*segment.fence, *behind.fence))",
        "segment.fence",
    ),
    (
        "joined segments forget the fence before",
        "actoffload/engine/hostpool.py",
        "latest_positions((*before.fence, *segment.fence))",
        "segment.fence",
    ),
    (
        "a buffer of a closed pool is used again",
        "actoffload/engine/hostpool.py",
        "if buffer.epoch != self._epoch:",
        "if False:",
    ),
    (
        "users on other streams are forgotten",
        "actoffload/engine/storage.py",
        "self._users = (*self._users, current)",
        "pass",
    ),
    (
        "another stream's wait counts for home",
        "actoffload/engine/storage.py",
        "self._users = (*self._users, current)",
        "self._users = (*self._users, current); self._awaited = True",
    ),
    (
        "device memory is taken on the current stream",
        "actoffload/engine/reload.py",
        "if backend.current_stream(transfers.device) == stream:",
        "if True:",
    ),
    (
        "an old mark stands for later copies out",
        "actoffload/engine/storage.py",
        "left = self.left if self.left is not None else home.transfers.end_of_copies_out()",
        "left = home.transfers.mark(home.transfers.back)",
    ),
    (
        "the mark of one copy stands for a later one of the same storage",
        "actoffload/engine/storage.py",
        "self.left = None  # what was behind",
        "pass  # what was behind",
    ),
    (
        "a layer ends without a mark behind its copies",
        "actoffload/engine/layer.py",
        "storage.left = self._left_mark(storage.home.transfers)",
        "pass",
    ),
    (
        "a mark of another stream stands for a copy that gives way",
        "actoffload/engine/registry.py",
        "storage.left = storage.home.transfers.end_of_copies_out(layer.captured)",
        "storage.left = storage.home.transfers.mark(storage.home.transfers.back)",
    ),
    (
        "any wait crosses the border of a capture",
        "actoffload/engine/transfer.py",
        "        if mark.captured == captured:\n            # [wait: any]\n",
        "        if True:\n",
    ),
    (
        "giving way crosses the border of a capture",
        "actoffload/engine/transfer.py",
        "            if mark.captured == captured:\n                self.backend.wait(home",
        "            if True:\n                self.backend.wait(home",
    ),
    (
        "what comes before a use crosses the border of a capture",
        "actoffload/engine/transfer.py",
        "if arrived.captured == captured:",
        "if True:",
    ),
    (
        "one home's wait counts for another home",
        "actoffload/engine/layer.py",
        "(home.transfers, storage.stream) not in waited",
        "not waited",
    ),
    (
        "what a retained graph holds stays after backward",
        "actoffload/engine/passes.py",
        "            if layer.index in self._started:\n                layer.backward_done()\n"
        "            elif retained:\n                layer.evict()\n",
        "            pass\n",
    ),
    (
        "a backward ends with a layer still back",
        "actoffload/engine/layer.py",
        "        self.evict()\n",
        "",
    ),
    (
        "what came back for the next part of a backward leaves",
        "actoffload/engine/passes.py",
        "            elif retained:",
        "            else:",
    ),
    (
        "start_offload counts after an edit",
        "actoffload/engine/tensor_marks.py",
        "if note is None or note.version != version or not unchanged(note.within):",
        "if note is None or not unchanged(note.within):",
    ),
    (
        "a partial forward goes on after its backward",
        "actoffload/engine/passes.py",
        "self.backward_begun = self.layers[-1].phase is not Phase.FORWARD",
        "pass",
    ),
    (
        "a gradient inside a layer ends the forward",
        "actoffload/engine/passes.py",
        "self.backward_begun = self.layers[-1].phase is not Phase.FORWARD",
        "self.backward_begun = True",
    ),
    (
        "a failed forward goes on",
        "actoffload/context/context.py",
        "current.aborted = kind is not None",
        "current.aborted = False",
    ),
]


def tagged(source: Path) -> Iterator[Mutant]:
    """Yield a mutant for every tag: the wait is skipped, the reference keeps nothing.

    Raises
    ------
    LookupError
        If a reference has a tag for which `KEPT_BY` does not say what takes its place.
    """
    for path in sorted(source.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            tag = TAG.search(line)
            if tag is None:
                continue
            alone = line.lstrip().startswith("#")  # then it is the tag of the line below
            first, last, column = _statement(ast.parse(text), number + alone)
            if tag[1] == "wait":
                instead = "pass"
            elif tag[2] in KEPT_BY:
                instead = KEPT_BY[tag[2]]
            else:
                raise LookupError(f"[keep: {tag[2]}] of {path.name} is not in KEPT_BY; say there what replaces it.")
            changed = [*lines[: first - 1], f"{' ' * column}{instead}\n", *lines[last:]]
            yield Mutant(f"{tag[1]}: {tag[2]}", str(path.relative_to(source)), number, "".join(changed))


def _statement(tree: ast.AST, line: int) -> tuple[int, int, int]:
    found = [
        node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    inner = max(found, key=lambda node: (node.lineno, node.col_offset))
    return inner.lineno, inner.end_lineno or inner.lineno, inner.col_offset


def conditions(source: Path) -> Iterator[Mutant]:
    """Yield a mutant for every row of `CONDITIONS`.

    Raises
    ------
    LookupError
        If the text of a row does not stand in its file exactly once: the row has to follow the source.
    """
    for name, path, old, new in CONDITIONS:
        text = (source / path).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise LookupError(f"'{name}': {path} has {text.count(old)} times {old!r}, expected once; adapt CONDITIONS.")
        line = text[: text.index(old)].count("\n") + 1
        yield Mutant(f"cond: {name}", path, line, text.replace(old, new))


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
