"""Print what this machine offers for offloading: ``python -m actoffload``."""

from __future__ import annotations

import argparse
import sys

from .machine import measure_machine


def main() -> int:
    """Measure the machine and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m actoffload",
        description="Measure what offloading of activations depends on: the link between device and host, matrix "
        "products, what they take longer beside copies, and the limits of host memory. "
        "Takes a few seconds and 1 GiB of host memory.",
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown, for an issue or a page")
    options = parser.parse_args()
    machine = measure_machine()
    sys.stdout.write(f"{machine.to_markdown() if options.markdown else machine}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
