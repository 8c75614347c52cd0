"""What calibrating on five runs is worth: median error on a source's other runs, before and after, over many draws.

python benchmarks/calibrate.py RUNS.csv [--runs 5] [--draws 20]

The five runs are drawn at random from a source's timed runs; `parsolve calibrate`'s own function fits them, starting
from two profiles: the stack's shipped one, which has seen the source, and the conservative default, which has not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from parsolve.calibration import calibrate
from parsolve.errors import SpecError
from parsolve.profiles import load_profile
from parsolve.specs import Profile
from parsolve.validation import predict, read_runs
from parsolve.validation.runs import Run

TARGET = 0.06
INTRO = """# What calibrating on a few runs is worth

Written by `python benchmarks/calibrate.py RUNS.csv {options}`;
do not edit by hand. Of every source with enough timed runs (here those named),
{size} are drawn at random, `parsolve calibrate` fits them, and the source's other runs are predicted with the result;
{draws} draws. Each source stands twice: from its stack's shipped profile, which has seen its runs, and from the
conservative default, which has not. Median errors on the other runs: the median over the draws, and the value that 9
of 10 draws keep.
"""


@dataclass(frozen=True)
class Worth:
    """Median errors on the runs left out, one value a draw."""

    before: list[float]
    after: list[float]

    def line(self, source: str, start: str, size: int) -> str:
        """A row of the table."""
        share = np.mean([value <= TARGET for value in self.after])
        cells = (
            *(source, start, str(size)),
            *(f"{100 * np.median(values):.1f}" for values in (self.before, self.after)),
            *(f"{100 * np.quantile(self.after, 0.9):.1f}", f"{100 * share:.0f}"),
        )
        return "| " + " | ".join(cells) + " |"


def worth(runs: Sequence[Run], size: int, draws: int) -> Worth:
    """Calibrate on ``size`` random runs, ``draws`` times, and predict the others before and after."""
    measured = np.array([run.step_s or np.nan for run in runs])
    name = runs[0].problem.profile.name
    result = Worth([], [])
    original = predict(runs).step_s
    for seed in range(draws):
        chosen = np.zeros(len(runs), bool)
        chosen[np.random.default_rng(seed).choice(len(runs), size, replace=False)] = True
        try:
            profile = calibrate([run for run, own in zip(runs, chosen, strict=True) if own]).profile
            step = predict(runs, {name: profile}).step_s
        except SpecError:  # the runs determine nothing: the profile stays as it is
            step = original
        for values, steps in ((result.before, original), (result.after, step)):
            values.append(float(np.median(np.abs(steps / measured - 1.0)[~chosen])))
    return result


def rebased(runs: Sequence[Run], profile: Profile) -> list[Run]:
    """The same runs under another profile."""
    problems = {run.key: run.problem.with_(profile=profile) for run in runs}
    return [replace(run, problem=problems[run.key]) for run in runs]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs")
    parser.add_argument("--runs", type=int, default=5, dest="size")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--source", action="append", help="these sources only")
    options = parser.parse_args()
    by_stack: dict[tuple[str, str], list[Run]] = {}
    for run in read_runs(options.runs).runs:
        if "time" in run.uses and run.step_s:
            by_stack.setdefault((run.source, run.problem.profile.name), []).append(run)
    told = " ".join(f"--source {name}" for name in options.source or ())
    print(INTRO.format(size=options.size, draws=options.draws, options=f"--draws {options.draws} {told}".rstrip()))
    print("| source | starting from | runs | median % before | after | 9 of 10 draws after | draws at most 6 % |")
    print("|---|---|---|---|---|---|---|")
    for (source, name), runs in sorted(by_stack.items()):
        if len(runs) < 3 * options.size or (options.source and source not in options.source):
            continue
        print(worth(runs, options.size, options.draws).line(source, name, len(runs)), flush=True)
        if name != "default":
            unseen = rebased(runs, load_profile("default"))
            print(worth(unseen, options.size, options.draws).line(source, "default", len(runs)), flush=True)


if __name__ == "__main__":
    main()
