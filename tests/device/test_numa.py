"""Which NUMA node a GPU has, by a made-up description of a host, and the memory policy around an allocation."""

from __future__ import annotations

from pathlib import Path

import pytest

from actoffload.device import host as numa


def host(tmp_path: Path, online: str, node: str | None) -> Path:
    nodes = tmp_path / "devices/system/node"
    nodes.mkdir(parents=True)
    (nodes / "online").write_text(online + "\n")
    device = tmp_path / "bus/pci/devices/0001:9a:0b.0"
    device.mkdir(parents=True)
    if node is not None:
        (device / "numa_node").write_text(node + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("online", "node", "expected"),
    [
        ("0-1", "1", 1),
        ("0-1", "0", 0),
        ("0,2", "2", 2),
        ("0", "0", None),  # one node: nothing to choose
        ("0-1", "-1", None),  # the system does not know
        ("0-1", None, None),  # no such file
        ("0-1", "one", None),
    ],
)
def test_node_of_a_device(tmp_path: Path, online: str, node: str | None, expected: int | None) -> None:
    assert numa.node_of_pci(1, 0x9A, 0x0B, host(tmp_path, online, node)) == expected


def test_a_host_that_describes_nothing(tmp_path: Path) -> None:
    assert numa.node_of_pci(0, 1, 0, tmp_path) is None


class System:
    """Stands for the system calls: one policy, which may be refused."""

    def __init__(self, policy: int, *, refuses: bool = False) -> None:
        self.policy, self.node, self.refuses = policy, None, refuses
        self.set_to: list[tuple[int, int | None]] = []

    def get(self) -> int:
        return self.policy

    def set(self, mode: int, node: int | None = None) -> bool:
        if self.refuses:
            return False
        self.policy, self.node = mode, node
        self.set_to.append((mode, node))
        return True


def use(monkeypatch: pytest.MonkeyPatch, system: System) -> None:
    monkeypatch.setattr(numa, "_policy", system.get)
    monkeypatch.setattr(numa, "_set_policy", system.set)


def test_the_policy_holds_in_the_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(numa.DEFAULT)
    use(monkeypatch, system)

    def fail() -> None:
        with numa.on_node(1) as preferred:
            assert preferred
            assert (system.policy, system.node) == (numa.PREFERRED, 1)
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert (system.policy, system.node) == (numa.DEFAULT, None)


@pytest.mark.parametrize(
    ("system", "node"),
    [(System(numa.DEFAULT), None), (System(2), 1), (System(numa.DEFAULT, refuses=True), 1)],
    ids=["no node", "a policy of the program", "refused"],
)
def test_nothing_changes(monkeypatch: pytest.MonkeyPatch, system: System, node: int | None) -> None:
    use(monkeypatch, system)
    before = system.policy
    with numa.on_node(node) as preferred:
        assert not preferred
    assert system.policy == before
    assert system.set_to == []
