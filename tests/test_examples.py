"""Every example runs; the lesson finds its sixty configurations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("script", sorted(f.name for f in EXAMPLES.glob("*.py")))
def test_script_runs(script: str) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_lesson_finds_sixty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import lesson_5d

    result = lesson_5d.solve()
    assert result.status == "optimal"
    found = {(c.dp, c.tp, c.pp, c.cp, c.zero, c.grad_acc) for c in (plan.config for plan in result.plans)}
    assert len(result.plans) == len(found) == 60
    assert (16, 8, 1, 1, 2, 62) in found
    assert (8, 8, 2, 1, 3, 123) in found
