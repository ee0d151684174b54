"""Print what this machine offers for offloading: ``python -m actoffload``."""

import sys

from .machine import measure_machine

if __name__ == "__main__":
    sys.stdout.write(f"{measure_machine()}\n")
