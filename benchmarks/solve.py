"""Solver benchmark: CPU-seconds, wall time, peak memory and status of standard problems, each in processes of its own.

    python benchmarks/solve.py                 the table
    python benchmarks/solve.py --growth        also llama2-70b from 8 to 131,072 GPUs
    python benchmarks/solve.py --write         also docs/benchmarks.md
    python benchmarks/solve.py --enumerate     beside it the vectorised enumeration of the same space, in the same run

Figures are of the solve alone (tables, bounds, ranking, proof), without Python's start-up and imports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

Problem = tuple[str, str, int, int]
"""Model, cluster, sequence length, global batch."""

PROBLEMS: list[Problem] = [
    ("llama3.1-8b", "h100-sxm:1x8", 8192, 128),
    ("gpt2-1.5b", "a100-sxm-80gb:1x6", 1024, 96),
    ("llama2-13b", "h100-sxm:3x8", 4096, 384),
    ("mixtral-8x7b", "h100-sxm:8x8", 4096, 256),
    ("llama2-70b", "h100-sxm:16x8", 4096, 1024),
    ("gpt3-175b", "a100-sxm-80gb:128x8", 2048, 1536),
    ("megatron-1t", "a100-sxm-80gb:384x8", 2048, 3072),
    ("nemotron-4-340b", "h100-sxm:768x8", 4096, 2304),
    ("llama3.1-405b", "h100-sxm:128x8", 8192, 1024),
    ("llama3.1-405b", "h100-sxm:2048x8", 8192, 2048),
    ("llama3.1-405b", "h100-sxm:2048x8", 131072, 128),
    ("qwen3-235b-a22b", "h100-sxm:32x8", 4096, 1024),
    ("deepseek-v3", "h800-sxm:32x8", 4096, 15360),
    ("deepseek-v3", "h800-sxm:256x8", 4096, 15360),
    ("kimi-k2", "gb200-nvl72:64x64", 4096, 16384),
    ("llama2-70b", "h100-sxm:16384x8", 4096, 131072),
]
ANY_CUT_LIMIT_S = 30.0
GROWTH = [("llama2-70b", f"h100-sxm:{n}x8", 4096, max(1024, 8 * n)) for n in (1, 4, 16, 64, 256, 1024, 4096, 16384)]


def solve_one(problem: Problem, top: int, cuts: str, enumeration_s: float) -> dict[str, Any]:
    """Solve one problem in this process; figures of the solve alone."""
    import resource
    import time

    import parsolve
    import parsolve.optimizer.model  # OR-Tools' import is start-up, not solve
    from parsolve.optimizer.ranking import Query, rank

    model, cluster, seq_len, gbs = problem
    given = parsolve.Problem(cluster, model, seq_len=seq_len, gbs=gbs)
    start = time.perf_counter()
    ranking = rank(given, Query(top=top, cuts=cuts), ANY_CUT_LIMIT_S if cuts == "any" else None)
    wall = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    best = ranking.plans[0] if ranking.plans else None
    beside = ""
    if enumeration_s > 0:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        from enumeration import enumerate_space

        whole = enumerate_space(given, top, enumeration_s)
        agrees = whole.best == [plan.key for plan in ranking.plans]
        outcome = ("same top" if agrees else "DIFFERS") if whole.finished else "not finished"
        beside = f"{whole.seconds:.1f} s, {whole.rows:.1e} rows, {whole.legal} legal, {outcome}"
    return {
        "status": "optimal" if ranking.complete and best else ("infeasible" if ranking.complete else "open"),
        "complete": ranking.complete,
        "cpu_s": ranking.cpu_s,
        "wall_s": wall,
        "proof_s": ranking.proof_s,
        "peak_mb": peak,
        "enumeration": beside,
        "search_space": ranking.search_space,
        "step_time_s": best.step_time_s if best else None,
        "best": f"tp{best.config.tp} pp{best.config.pp} cp{best.config.cp} ep{best.config.ep}" if best else "",
    }


def run(problems: list[Problem], top: int, enumeration_s: float) -> list[dict[str, Any]]:
    """Each problem over listed cuts and over any, each in a process of its own: none begins warm."""
    rows = []
    for problem in problems:
        row, any_cut = (_in_own_process(problem, top, *how) for how in (("auto", enumeration_s), ("any", 0.0)))
        gain = row["step_time_s"] / any_cut["step_time_s"] - 1 if row["step_time_s"] else 0.0
        row |= dict(zip(("model", "cluster", "seq_len", "gbs"), problem, strict=True))
        row["any_s"] = any_cut["cpu_s"]
        row["any_text"] = f"{100 * gain:.1f} %" + ("" if any_cut["complete"] else ", not proven")
        rows.append(row)
        print(row_text(row), flush=True)
    return rows


def _in_own_process(problem: Problem, top: int, cuts: str, enumeration_s: float) -> dict[str, Any]:
    call = [sys.executable, __file__, "--one", json.dumps([problem, top, cuts, enumeration_s])]
    answer = subprocess.run(call, capture_output=True, text=True, check=True, timeout=300 + 2 * enumeration_s)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


HEADER = (
    "| model | cluster | seq | GBS | status | CPU s | wall s | proof s | peak MB | combinations | best "
    "| any cut CPU s | any cut faster by | enumeration |"
)


RULE = "|" + " --- |" * 14


def row_text(row: dict[str, Any]) -> str:
    """One Markdown row."""
    return (
        f"| {row['model']} | {row['cluster']} | {row['seq_len']} | {row['gbs']} | {row['status']} "
        f"| {row['cpu_s']:.2f} | {row['wall_s']:.2f} | {row['proof_s']:.2f} "
        f"| {row['peak_mb']:.0f} | {row['search_space']:.1e} | {row['best']} "
        f"| {row['any_s']:.2f} | {row['any_text']} | {row['enumeration']} |"
    )


def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--top", type=int, default=10)
    parser.add_argument("--enumerate", type=float, nargs="?", const=120.0, default=0.0, metavar="SECONDS")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(solve_one(*json.loads(options.one))))
        return
    lines = [
        "# Solver benchmark",
        "",
        f"`python benchmarks/solve.py`, top {options.top}, Python {platform.python_version()}, {machine()}, one solver "
        "thread. CPU-seconds of the solve: tables, bounds, ranking and proof, without start-up. The any-cut columns "
        f"are of `--cuts any`, all cuts of every plan, stopped after {ANY_CUT_LIMIT_S:.0f} s of wall time.",
        "The last column is the vectorised enumeration of the same space in the same process, when asked for "
        f"(`--enumerate`, here stopped after {options.enumerate:g} s of wall time).",
        *table("Standard problems", PROBLEMS, options.top, options.enumerate),
    ]
    if options.growth:
        lines += table("Growth with the number of GPUs", GROWTH, options.top, options.enumerate)
    if options.write:
        (ROOT / "docs" / "benchmarks.md").write_text("\n".join([*lines, ""]))


def table(title: str, problems: list[Problem], top: int, enumeration_s: float) -> list[str]:
    """A section of the page; its rows are printed as they come."""
    print(f"\n{title}\n{HEADER}\n{RULE}", flush=True)
    rows = run(problems, top, enumeration_s)
    cpu, any_cut = ([row[name] for row in rows] for name in ("cpu_s", "any_s"))
    summary = (
        f"CPU-seconds: median {statistics.median(cpu):.2f}, most {max(cpu):.2f}; any cut median "
        f"{statistics.median(any_cut):.2f}, most {max(any_cut):.2f}; "
        f"most memory {max(row['peak_mb'] for row in rows):.0f} MB."
    )
    print(summary)
    return ["", f"## {title}", "", HEADER, RULE, *(row_text(row) for row in rows), "", summary]


def machine() -> str:
    """The processor, and how busy it was with other work."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    busy = f"load average {os.getloadavg()[0]:.1f} at the start"
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}, {busy}"


if __name__ == "__main__":
    main()
