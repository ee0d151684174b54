"""Host memory of the machine and of a container, and what is left of it when memory is pinned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actoffload.device import host as module
from actoffload.device.host import HostMemory, check_room, host_memory

GIB = 2**30
LIMITS = {
    "version 2": ("memory.max", "memory.current"),
    "version 1": ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
}


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 64 GiB, 48 of them available."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {48 * 2**20} kB\n")
    return tmp_path


def test_memory_of_the_machine(root):
    found = host_memory(root)
    assert (found.total, found.available) == (64 * GIB, 48 * GIB)


@pytest.mark.parametrize("version", LIMITS)
def test_a_container_has_less_and_its_cached_files_are_available(root, version):
    limit, used = LIMITS[version]
    write(root, f"sys/fs/cgroup/{limit}", f"{16 * GIB}\n")
    write(root, f"sys/fs/cgroup/{used}", f"{15 * GIB}\n")
    found = host_memory(root)
    assert (found.total, found.available) == (16 * GIB, GIB)
    prefix = "total_" if version == "version 1" else ""
    text = f"anon {5 * GIB}\n{prefix}inactive_file {8 * GIB}\n{prefix}active_file {2 * GIB}\nshmem 5\n"
    write(root, f"sys/fs/cgroup/{Path(limit).parent}/memory.stat", text)
    assert host_memory(root).available == 11 * GIB


GROUPS = {"version 2": Path("/sys/fs/cgroup"), "version 1": Path("/sys/fs/cgroup/memory")}

INSIDE = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from actoffload.device.host import host_memory, room
found = host_memory()
print(found.total, found.available, room())
"""


def test_a_real_control_group():
    """As under ``systemd-run --scope -p MemoryMax=2G``: the group is not at the place of the root."""
    for version, folder in GROUPS.items():
        group = folder / f"actoffload-{os.getpid()}"
        limit = group / Path(LIMITS[version][0]).name
        try:
            group.mkdir()
            with limit.open("r+") as file:  # there is none where nothing is mounted
                file.write(str(2 * GIB))
            break
        except OSError:
            if group.is_dir():
                group.rmdir()
    else:
        pytest.skip("This process may not make a control group with a limit.")
    try:
        run = subprocess.run(
            [sys.executable, "-c", INSIDE, group],
            env={**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=240,
        )
        total, available, room = map(int, run.stdout.split())
    finally:
        group.rmdir()
    assert total == 2 * GIB
    assert GIB < available < 2 * GIB, "less what the process uses"
    assert room == pytest.approx(available - 0.1 * total, abs=1)


def test_processes_of_one_host_share_its_memory(root, monkeypatch):
    monkeypatch.setattr(module, "host_memory", lambda: HostMemory(64 * GIB, 48 * GIB))
    alone = module.room()
    assert alone == 48 * GIB - int(6.4 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert module.room() == alone // 4


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_a_control_group_without_a_limit(root, limit):
    for names in LIMITS.values():
        write(root, f"sys/fs/cgroup/{names[0]}", limit)
    assert host_memory(root).total == 64 * GIB


@pytest.mark.parametrize(
    ("available", "nbytes", "fits"), [(48, 40, True), (48, 42, False), (6, 1, False), (0, 1, False)]
)
def test_a_tenth_of_the_host_memory_is_never_pinned(monkeypatch, available, nbytes, fits):
    monkeypatch.setattr(module, "host_memory", lambda: HostMemory(64 * GIB, available * GIB))
    if fits:
        check_room(nbytes * GIB)
    else:
        with pytest.raises(MemoryError, match=r"of 64.00 GiB of host memory are available, and 6.40 GiB are left"):
            check_room(nbytes * GIB)


def test_where_the_system_does_not_tell_its_memory_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(module, "host_memory", lambda: HostMemory(0, 0))
    check_room(2**60)
