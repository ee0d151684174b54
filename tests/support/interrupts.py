"""An interrupt before the n-th bytecode of the package's code."""

import dis
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import actoffload
from actoffload.engine.host_pool import settle

SOURCES = Path(actoffload.__file__).parent

SKIPPED = (
    "__del__",  # Python swallows what a finalizer raises
    "add_user",  # these hold a lock by `with`, between whose bytecodes Python does not handle signals
    "remove_user",
    "forward_begins",
    "retire",
)

HANDLING = [dis.opmap[name] for name in ("PUSH_EXC_INFO", "COPY", "POP_EXCEPT")]
"""At the borders of a handler Python handles no signals; an exception there would keep the handled one for good."""


class Interrupt:
    """Raises KeyboardInterrupt once, when so many bytecodes of files whose names begin in some ways have run."""

    def __init__(self, after: int, files: tuple[str, ...]) -> None:
        self.left = after
        self.files = files

    def __call__(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.files) or frame.f_code.co_name in SKIPPED:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.opcode

    def opcode(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            self.left -= 1
            if self.left < 0 and frame.f_code.co_code[frame.f_lasti] not in HANDLING:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.opcode


def interrupted(run: Callable[[], Any], after: int, files: tuple[str, ...]) -> bool:
    """Run something with an interrupt; return whether it came."""
    sys.settrace(Interrupt(after, files))
    try:
        run()
        sys.settrace(None)
        settle()  # raises an interrupt that came while a finalizer ran
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False
