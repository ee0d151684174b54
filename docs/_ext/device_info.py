"""Identify the device that the figures of a page were measured on, and measure its link to the host."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata

from recording_data import Provenance

REFERENCE_DEVICE = "reference device (CPU)"
TOOLCHAIN = ("sphinx", "sphinx-gallery", "matplotlib", "numpy")


def has_accelerator() -> bool:
    """Return whether torch sees an accelerator. torch is imported here, not at the top, since that takes seconds."""
    import torch

    return torch.accelerator.is_available()


def device_name() -> str:
    """Return the name of the accelerator, or `REFERENCE_DEVICE`."""
    import torch

    if not has_accelerator():
        return REFERENCE_DEVICE
    module = torch.get_device_module()
    return str(module.get_device_name())


def driver_version() -> str:
    """Return the version of the accelerator driver, or "unknown"."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n", 1)[0].strip() or "unknown"


def measure_link(nbytes: int = 256 * 2**20, repeats: int = 8) -> dict[str, float]:
    """Measure the bandwidth between the accelerator and pinned host memory.

    Parameters
    ----------
    nbytes : int
        Bytes of one copy.
    repeats : int
        Copies in each direction; the fastest counts, since the others shared the link.

    Returns
    -------
    dict of str to float
        Bytes per second, keys ``d2h`` and ``h2d``.
    """
    import torch

    device = torch.accelerator.current_accelerator()
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
    on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    result = {}
    for key, target, source in (("d2h", on_host, on_device), ("h2d", on_device, on_host)):
        fastest = float("inf")
        target.copy_(source, non_blocking=True)  # the first copy includes page faults and clock changes
        for _ in range(repeats):
            start, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            torch.accelerator.synchronize()
            fastest = min(fastest, start.elapsed_time(end) / 1e3)
        result[key] = nbytes / fastest
    return result


def describe(example: str, example_digest: str, source_digest: str, link: dict[str, float], command: str) -> Provenance:
    """Return the provenance of a run that was made in this process just now.

    Parameters
    ----------
    example, example_digest, source_digest : str
        See `Provenance`.
    link : dict of str to float
        Result of `measure_link`, or empty.
    command : str
        Command of the run.
    """
    import torch

    reference = not has_accelerator()
    return Provenance(
        example=example,
        example_digest=example_digest,
        source_digest=source_digest,
        device=device_name(),
        reference=reference,
        driver="" if reference else driver_version(),
        torch=torch.__version__,
        python=platform.python_version(),
        link=link,
        toolchain={name: metadata.version(name) for name in TOOLCHAIN},
        command=command,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
