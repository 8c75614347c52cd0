"""A small table of published step times, a row a test: the estimate stays within the stated tolerance.

``published/runs.csv`` cites each figure in ``source_ref``; ``tolerance`` is relative, ``reason`` says why.
The rows are ones that the model gets right: a guard against change. docs/accuracy.md has the errors of all runs.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from parsolve.validation import predict, read_runs

TABLE = Path(__file__).parent / "published" / "runs.csv"


def rows() -> list[dict[str, str]]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["row_id"])
def test_published_step_time(row: dict[str, str]) -> None:
    table = read_runs([row])
    assert not table.skipped
    (run,) = table.runs
    (step,) = predict([run]).step_s
    assert step == pytest.approx(run.step_s, rel=float(row["tolerance"])), row["reason"]


def test_every_row_is_cited_and_has_a_reason() -> None:
    table = rows()
    assert 35 <= len(table) <= 50
    assert len({row["source_id"] for row in table}) >= 12
    assert all(row["source_ref"] and row["reason"] and 0 < float(row["tolerance"]) <= 0.25 for row in table)
