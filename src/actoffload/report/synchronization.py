"""Names the lines of user code that synchronize host and device."""

from __future__ import annotations

import linecache
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from os import sep
from pathlib import Path
from typing import Any

from .sync_frames import Line
from .sync_watch import Sighting, Watch

__all__ = []

_running = threading.Lock()


@dataclass(frozen=True)
class Synchronization:
    """A line of code that makes the host wait for the device.

    Attributes
    ----------
    file : str
        The file of the line: the innermost one that belongs neither to torch nor to an installed package, else the
        innermost one outside of torch, else ``"<unknown>"``.
    line : int
        Number of the line, from 1 on; 0 where it is unknown.
    function : str
        Qualified name of the function that the line belongs to.
    code : str
        The text of the line, empty where the source cannot be read.
    operation : str
        What waited: the name of an operator (``"aten::nonzero"``) or of a function (``"torch.cuda.synchronize"``).
    count : int
        How often.
    in_backward : bool
        Whether it happened during a backward.  Autograd's own threads run no Python of the program; the line is
        then that of the call of backward.
    why : str
        Why the operation waits.
    instead : str
        What to do about it.
    inside : str
        Where the line called a package that synchronized inside: that place as ``"file:line"``; else empty.
    """

    file: str
    line: int
    function: str
    code: str
    operation: str
    count: int
    in_backward: bool
    why: str
    instead: str
    inside: str = ""

    def __str__(self) -> str:
        where = f"{_short(self.file)}:{self.line} in {self.function}, {_times(self.count)}"
        lines = [where + (", in backward" if self.in_backward else "")]
        if self.code:
            lines.append(f"    {self.code}")
        if self.inside:
            lines.append(f"  inside {_short(self.inside)}")
        return "\n".join([*lines, f"  {self.operation}: {self.why}", f"  instead: {self.instead}"])


class Synchronizations:
    """What `find_synchronizations` found: iterates over `Synchronization`, in the order of their first occurrence.

    ``len`` is the number of entries, and the truth value says whether there is one.  The same line has one entry for
    each operation, and one more for what it did in backward.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Sighting, int] = {}
        self._sources: dict[Line, str] = {}
        self._watch = Watch(self._see)

    @contextmanager
    def _filling(self) -> Iterator[None]:
        try:
            with self._watch.watching():
                yield
        finally:
            # Read now: files change, and a prompt or a doctest forgets its source.
            lines = [sighting.place.line for sighting in self._counts]
            self._sources = {line: _source(line) for line in lines}

    def _see(self, sighting: Sighting) -> None:
        with self._lock:  # backward may run on several threads
            self._counts[sighting] = self._counts.get(sighting, 0) + 1

    @property
    def by_operator(self) -> bool:
        """Whether no accelerator was used, so that tensors on the CPU were taken for tensors on a device."""
        return not self._watch.used_accelerator

    @property
    def count(self) -> int:
        """How often the host waited, all entries together."""
        return sum(found.count for found in self)

    def _found(self) -> list[Synchronization]:
        with self._lock:
            counts = list(self._counts.items())
        chosen = [(sighting, count) for sighting, count in counts if self.by_operator or not sighting.on_cpu]
        return [self._public(sighting, count) for sighting, count in chosen]

    def _public(self, sighting: Sighting, count: int) -> Synchronization:
        line, library = sighting.place.line, sighting.place.library
        code = self._sources.get(line)
        return Synchronization(
            file=line.file,
            line=line.number,
            function=line.function,
            code=_source(line) if code is None else code,
            operation=sighting.operation,
            count=count,
            in_backward=sighting.in_backward,
            why=sighting.cause.why,
            instead=sighting.cause.instead,
            inside="" if library is None else f"{library.file}:{library.number}",
        )

    def __iter__(self) -> Iterator[Synchronization]:
        return iter(self._found())

    def __len__(self) -> int:
        return len(self._found())

    def __repr__(self) -> str:
        return f"Synchronizations({len(self)} found, {_times(self.count)})"

    def __str__(self) -> str:
        found = self._found()
        if not found:
            return "No synchronization was found."
        lines = len({(one.file, one.line) for one in found})
        count = sum(one.count for one in found)
        title = f"The host waits for the device {_times(count)}, at {lines} line{'s' * (lines > 1)}."
        parts = [title, *(str(one) for one in found)]
        if self.by_operator:
            parts.append("No accelerator was used: tensors on the CPU were taken for tensors on a device.")
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data.

        Returns
        -------
        dict
            ``"synchronizations"``, a list with the attributes of each `Synchronization`; ``"count"``; and
            ``"by_operator"``.
        """
        return {
            "synchronizations": [asdict(found) for found in self],
            "count": self.count,
            "by_operator": self.by_operator,
        }


@contextmanager
def find_synchronizations() -> Iterator[Synchronizations]:
    """Find the lines that make the host wait for the device.

    Inside of the block each wait is noted with the line of user code behind it.  Nothing is printed, no value changes,
    and everything that was installed is taken back at the end of the block, also after an exception.  Operations take
    longer meanwhile, so look at one step and not at many.

    Yields
    ------
    Synchronizations
        What was found; it fills up as the block runs.

    Raises
    ------
    RuntimeError
        If another block is running: the sync debug mode belongs to the whole process.

    See Also
    --------
    torch.cuda.set_sync_debug_mode : What this asks on CUDA.

    Notes
    -----
    On CUDA the finding rests on `torch.cuda.set_sync_debug_mode`, for all threads, and on wrapped functions for
    explicit calls of ``synchronize``.  Elsewhere operators are recognised by name and arguments, on the thread of the
    block and in the backwards that it calls.  Where a block uses no accelerator, its CPU tensors are taken for tensors
    on a device.

    Examples
    --------
    >>> mask = torch.tensor([True, False, True])
    >>> x = torch.ones(3)
    >>> with find_synchronizations() as found:
    ...     kept = torch.where(mask, x, 0.0)  # keeps the shape
    ...     total = kept.sum().item()
    >>> [(one.line, one.operation) for one in found]
    [(3, 'aten::item / aten::_local_scalar_dense')]
    """
    if not _running.acquire(blocking=False):
        raise RuntimeError(
            "find_synchronizations is running already, and watches the whole process: leave its block before entering "
            "another one."
        )
    try:
        found = Synchronizations()
        with found._filling():
            yield found
    finally:
        _running.release()


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _source(line: Line) -> str:
    return linecache.getline(line.file, line.number).strip()


def _short(file: str) -> str:
    """Return a path as people want to read it: without the folder of packages, or relative to where they are."""
    for folder in (f"{sep}site-packages{sep}", f"{sep}dist-packages{sep}"):
        if folder in file:
            return file.split(folder, 1)[1]
    return file.removeprefix(f"{Path.cwd()}{sep}")
