"""Processes of ranks that hang are killed, and their log says that they timed out."""

from __future__ import annotations

import time
from pathlib import Path

from forked import run_forked


def main(rank: int) -> None:
    if rank:
        time.sleep(600)


def test_a_rank_that_hangs_timed_out(tmp_path: Path):
    begun = time.monotonic()
    run_forked(main, 2, tmp_path, limit=20.0)
    assert time.monotonic() - begun < 300
    assert "timed out" not in (tmp_path / "0.log").read_text()
    assert "Rank 1 timed out: it has not ended after 20 s." in (tmp_path / "1.log").read_text()
