"""Host memory of the machine and of a container, its NUMA nodes, and how much of a device's memory plans use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from actoffload.device import host as module
from actoffload.device.base import usable
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


@pytest.mark.parametrize("version", LIMITS)
def test_a_container_has_less_and_its_cached_files_are_available(root, version):
    limit, used = LIMITS[version]
    for without in ("max", str(2**63 - 4096)):
        write(root, f"sys/fs/cgroup/{limit}", without)
        assert host_memory(root) == HostMemory(64 * GIB, 48 * GIB)
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
    assert room == pytest.approx(available - 0.1 * total, abs=1 << 20), "read a moment later"


def test_processes_of_one_host_share_its_memory(root, monkeypatch):
    monkeypatch.setattr(module, "host_memory", lambda: HostMemory(64 * GIB, 48 * GIB))
    alone = module.room()
    assert alone == 48 * GIB - int(6.4 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert module.room() == alone // 4


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


# Pinned memory


def flags(address: int) -> set[str]:
    """Return the flags of the mapping that an address lies in; none where nothing is mapped."""
    found, wanted = False, set()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            start, stop = (int(part, 16) for part in line.split()[0].split("-"))
            found = start <= address < stop
        elif found and line.startswith("VmFlags"):
            wanted = set(line.split()[1:])
    return wanted


@pytest.mark.skipif(sys.platform != "linux", reason="Elsewhere PyTorch pins memory.")
def test_pages_stay_mapped_until_the_driver_has_unlocked_them():
    registered, unregistered = [], []

    def unregister(address: int) -> None:
        assert flags(address), "still mapped"
        unregistered.append(address)

    nbytes = 2 * module.PIECE + 4096
    memory = module.pin(nbytes, lambda *arguments: registered.append(arguments) or 0, unregister)
    address = memory.data_ptr()
    assert registered == [(address, nbytes, 0)]
    assert memory.dtype is torch.uint8
    assert memory.numel() == nbytes
    assert not memory.any(), "every page was touched"
    assert "dc" in flags(address), "forked processes do not get the pages"
    part = memory[nbytes - 8 :].view(torch.int64)
    del memory
    module.unpin()
    assert unregistered == []
    assert part.item() == 0
    del part
    module.unpin()
    assert unregistered == [address]
    assert not flags(address)


@pytest.mark.skipif(sys.platform != "linux", reason="Elsewhere PyTorch pins memory.")
def test_memory_that_the_driver_or_the_system_refuses():
    assert module.pin(4096, lambda *_: 2, pytest.fail) is None
    assert module.pin(2**60, pytest.fail, pytest.fail) is None
    module.unpin()


FORKED = """
import ctypes, os
from actoffload.device import host
memory = host.pin(1 << 22, lambda *_: 0, lambda address: None)
address, nbytes = memory.data_ptr(), memory.numel()
process = os.fork()
if not process:
    libc = ctypes.CDLL(None)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    fixed = 0x100000  # MAP_FIXED_NOREPLACE: the pages are not there
    assert libc.mmap(address, nbytes, 3, fixed | 0x22, -1, 0) == address
    del memory
    host.unpin()
    ctypes.memset(address, 1, nbytes)
    os._exit(0)
assert os.waitpid(process, 0)[1] == 0
assert not memory.any()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Elsewhere PyTorch pins memory.")
def test_a_forked_process_unmaps_nothing_of_its_own():
    source = str(Path(module.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source}
    subprocess.run([sys.executable, "-c", FORKED], env=environment, check=True, timeout=240)


# How much of the memory of a device plans use


GIB, MIB = 2**30, 2**20


@pytest.mark.parametrize(
    ("limit", "largest", "left"),
    [
        (80 * GIB, 128 * MIB, 0.03),  # small tensors in a large memory
        (80 * GIB, GIB, 4 / 80),
        (80 * GIB, 4 * GIB, 0.18),  # as logits with a large vocabulary
        (4.51 * GIB, 128 * MIB, 0.5 / 4.51),  # here gaps took 6 %
        (GIB, 0, 0.03),
    ],
)
def test_more_is_left_where_tensors_are_large_for_the_memory(limit: int, largest: int, left: float) -> None:
    assert usable(limit, largest) == pytest.approx((1 - left) * limit)


# The NUMA node of a GPU, and the threads that touch its memory


def host(tmp_path: Path, online: str, node: str | None) -> Path:
    write(tmp_path, "devices/system/node/online", online + "\n")
    device = "bus/pci/devices/0001:9a:0b.0"
    write(tmp_path, f"{device}/local_cpulist", "4-6,9\n")
    if node is not None:
        write(tmp_path, f"{device}/numa_node", node + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("online", "node", "known"),
    [
        ("0-1", "1", True),
        ("0,2", "2", True),
        ("0", "0", False),  # one node: nothing to choose
        ("0-1", "-1", False),  # the system does not know
        ("0-1", None, False),  # no such file
        ("0-1", "one", False),
    ],
)
def test_processors_near_a_device(tmp_path: Path, online: str, node: str | None, known: bool) -> None:
    assert not module.cpus_near(1, 0x9A, 0x0B, tmp_path), "the host describes nothing"
    assert module.cpus_near(1, 0x9A, 0x0B, host(tmp_path, online, node)) == ({4, 5, 6, 9} if known else set())


@pytest.mark.skipif(sys.platform != "linux", reason="Elsewhere PyTorch pins memory.")
def test_threads_on_processors_near_the_device_touch_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen, touch = os.sched_getaffinity(0), [], module.ctypes.memset

    def memset(*arguments: int) -> None:
        seen.append(os.sched_getaffinity(0))
        touch(*arguments)

    monkeypatch.setattr(module.ctypes, "memset", memset)
    one = {max(before)}
    for cpus, expected in ((one, one), (set(), before), ({2**14}, before)):  # there are not so many
        assert module.pin(4096, lambda *_: 0, lambda address: None, cpus) is not None
        assert seen.pop() == expected
    assert os.sched_getaffinity(0) == before
