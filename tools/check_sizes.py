"""Check that the source stays small and its names plain: ``python tools/check_sizes.py``.

Prints each thing that is above a limit, and exits with 1 then.  `LINES` and `FILES` are what there is; they are lowered
with each change that deletes, and never raised.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
LINES, FILES = 18_393, 77
FILE_LINES = 500
PACKAGE_FILES = 10  # beside __init__.py
EMPTY_NAMES = {"of"}  # say nothing about the thing that they name


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names of parameters and variables with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno


def problems(source: Path) -> Iterator[str]:
    """Yield what is above the limits in a folder of Python files."""
    files = {path.relative_to(source): path.read_text(encoding="utf-8") for path in sorted(source.rglob("*.py"))}
    lines = {path: text.count("\n") for path, text in files.items()}
    if sum(lines.values()) > LINES:
        yield f"The source has {sum(lines.values())} lines; at most {LINES} are allowed: delete something."
    if len(files) > FILES:
        yield f"The source has {len(files)} files; at most {FILES} are allowed: join some that are read together."
    for path, count in lines.items():
        if count > FILE_LINES:
            yield f"{path} has {count} lines; at most {FILE_LINES} are allowed: split it by its jobs."
    packages = Counter(path.parent for path in files if path.name != "__init__.py")
    for package, count in packages.items():
        if count > PACKAGE_FILES:
            yield f"{package} has {count} files; at most {PACKAGE_FILES} are allowed beside __init__.py."
    for path, text in files.items():
        for name, line in names(ast.parse(text)):
            if name in EMPTY_NAMES:
                yield f"{path}:{line} has a variable called '{name}'; name it after the thing."


def main() -> int:
    """Print the problems; return 1 if there are any."""
    found = list(problems(SOURCE))
    for problem in found:
        print(problem)
    print(f"sizes: {len(found)} problems.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
