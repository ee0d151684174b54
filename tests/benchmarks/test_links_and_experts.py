"""The job of experts in a pipeline on four ranks, in a tiny size."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import experts
import pytest
import torch
from harness import run_arms
from jobs import JOBS
from processes import run_ranks
from record_machine import links

ARMS = "none", "qkv", "offload"


def measured(_: torch.device, folder: str) -> list[dict[str, Any]]:
    links(Path(folder), {"device": {"name": "some GPU"}}, rehearse=True)
    job = replace(JOBS["E4"], warm_up=1, steps=1)
    return run_arms(job, experts.trainer("E4", rehearse=True), lambda sample: None, ARMS)


@pytest.mark.timeout(240)
def test_peaks_of_ranks_drop_by_what_is_expected(tmp_path: Path) -> None:
    first, *others = run_ranks(measured, str(tmp_path), world=4, device="cpu", limit=200)
    found = {sample["arm"]: sample for sample in first}
    assert [sample["status"] for sample in first] == ["ok"] * len(ARMS), first
    assert all(each["ranks"] == sample["ranks"] for of in others for each, sample in zip(of, first, strict=True))
    assert len({tuple(sample["values"]) for sample in first}) == 1
    for arm in ("qkv", "offload"):
        for without, now in zip(found["none"]["ranks"], found[arm]["ranks"], strict=True):
            drop = without["peak_bytes"] - now["peak_bytes"]
            assert now["drop_bytes"] > 0
            assert abs(drop - now["drop_bytes"]) <= 32 * 1024  # some small buffers of the messages
        assert found[arm]["predicted_bytes"] > 0
    written = (tmp_path / "links.json").read_text()
    assert written.count("h2d_alone") == 4
