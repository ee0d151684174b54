"""Print what this machine offers for offloading: ``python -m actoffload``; or train a model that does not fit."""

from __future__ import annotations

import argparse
import sys

from .demo import demo
from .machine import measure_machine


def main() -> int:
    """Measure the machine and print the result, or run the demo."""
    parser = argparse.ArgumentParser(
        prog="python -m actoffload",
        description="Measure what offloading of activations depends on: the link between device and host, matrix "
        "products, what they take longer beside copies, and the limits of host memory. "
        "Takes a few seconds and 1 GiB of host memory.",
    )
    parser.add_argument("demo", nargs="?", choices=["demo"], help="train a model that does not fit instead")
    parser.add_argument("--markdown", action="store_true", help="print Markdown, for an issue or a page")
    options = parser.parse_args()
    if options.demo:
        demo()
        return 0
    machine = measure_machine()
    sys.stdout.write(f"{machine.to_markdown() if options.markdown else machine}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
