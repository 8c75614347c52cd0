"""Fits the shipped profiles and writes docs/accuracy.md from a table of published runs.

python docs/generate_accuracy.py RUNS.csv            # the page, from the profiles as they are
python docs/generate_accuracy.py RUNS.csv --fit      # fit the profiles first (some minutes), then the page
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from parsolve.calibration import FITTED, Fit, equal_weights, out_of_fold
from parsolve.profiles import load_profile
from parsolve.validation import Prediction, Runs, predict, read_runs, summarise
from parsolve.validation.profile_file import write_profile
from parsolve.validation.runs import Run

PROFILES = Path(__file__).parents[1] / "parsolve" / "data" / "profiles"
PAGE = Path(__file__).with_name("accuracy.md")
FOLDS = 5


@dataclass(frozen=True)
class Family:
    """A shipped profile: what it starts from, what is set by knowledge of the stack, and which constants are fitted."""

    name: str
    comment: str
    base: str = "default"
    known: dict[str, tuple[float, str]] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ("pipelined_member_time", "shard_member_time")
    strength: float = 1.0

    def constants(self) -> list[Any]:
        """The constants that are fitted."""
        return [c for c in FITTED if (c.name in self.only if self.only else c.name not in self.without)]


TUNED = {
    "tp_overlap": (0.5, "assumed start: tensor-parallel overlap is on in the published recipes"),
    "ep_overlap": (0.3, "assumed start: overlapped or accelerated dispatch in the published recipes"),
    "expert_imbalance": (1.0, "the published runs force balanced routing"),
}
HALF = {
    "gradient_bytes": (2.0, "16-bit gradients"),
    "reduction_bytes": (2.0, "gradients are reduced in 16 bits"),
}
WHOLE = {"gradient_bytes": (4.0, "32-bit gradients are accumulated")}
FAMILIES = (
    Family("megatron-ampere", "Megatron-LM, Megatron-Core and close relatives on A100 and A800."),
    Family("megatron-hopper", "Megatron-Core and NeMo on H100, H200, H800.", known=TUNED),
    Family("megatron-blackwell", "Megatron-Core and Megatron-Bridge on B200, B300, GB200, GB300.", known=TUNED),
    Family(
        "megatron-deepspeed-ampere",
        "Megatron-DeepSpeed of 2022 and later on A100: fused softmax, full recomputation.",
        known={**HALF, "launch_time": (2e-5, "assumed start: eager PyTorch")},
        without=(
            "pipelined_member_time",
            "shard_member_time",
            "tp_overlap",
            "attention_efficiency",
            "attention_backward_efficiency",
        ),
    ),
    Family(
        "megatron-deepspeed-blocking-ampere",
        "Megatron-DeepSpeed with CUDA_LAUNCH_BLOCKING=1: nothing overlaps and collectives wait for the host.",
        base="megatron-deepspeed-ampere",
        only=("nic_efficiency", "launch_time", "step_overhead", "p2p_efficiency"),
        strength=0.2,
    ),
    Family(
        "fsdp-ampere",
        "PyTorch FSDP (llm-foundry, torchtitan, fms-fsdp) on A100.",
        known={**WHOLE, "reduction_bytes": HALF["reduction_bytes"]},
    ),
    Family(
        "fsdp-hopper",
        "PyTorch FSDP (llm-foundry, torchtitan, fms-fsdp) on H100, H200.",
        known={**WHOLE, "reduction_bytes": HALF["reduction_bytes"]},
    ),
    Family(
        "nanotron-hopper",
        "nanotron on H100: eager PyTorch, little overlap, slow launches when stages and tensor parallelism meet.",
        known={
            **WHOLE,
            "launch_time": (5e-5, "assumed start: eager PyTorch"),
            "pipelined_member_time": (2e-3, "assumed start"),
        },
        without=("tp_overlap", "shard_member_time"),
        strength=0.3,
    ),
    Family(
        "internevo-ampere",
        "InternEvo on A100 and A800.",
        known={**WHOLE, "shard_member_time": (1e-3, "assumed start")},
        without=("pipelined_member_time",),
    ),
    Family("oneflow-volta", "OneFlow on V100."),
)


def timed(runs: Runs, profile: str) -> list[Run]:
    """The runs of a profile that carry a step time and may be used for it."""
    return [r for r in runs.runs if r.problem.profile.name == profile and "time" in r.uses and r.step_s]


def fit_of(family: Family, runs: Runs) -> Fit:
    """The fit of a family: prior, constants, runs and weights."""
    base = load_profile(family.base)
    start = base.model_copy(update={name: value for name, (value, _) in family.known.items()})
    mine = timed(runs, family.name)
    return Fit(mine, start, family.constants(), equal_weights(mine))


def fit_profile(family: Family, runs: Runs) -> None:
    """Fit one profile and write its file; constants that the runs did not move stay with the base."""
    fit = fit_of(family, runs)
    solution = fit.solve(strength=family.strength)
    sources = ", ".join(sorted({run.source for run in fit.runs}))
    moved = {
        c.name: (c.outer(value), f"fitted on {len(fit.runs)} runs of {sources}")
        for c, value, prior in zip(fit.constants, solution, fit.prior, strict=True)
        if abs(value - prior) > 0.02 * c.width
    }
    keep = memory_constants(family.name)
    write_profile(
        PROFILES / f"{family.name}.toml", family.name, family.base, family.comment, {**family.known, **moved, **keep}
    )


def memory_constants(name: str) -> dict[str, tuple[float, str]]:
    """Memory constants of the stack and hardware, see MEMORY."""
    from accuracy_memory import MEMORY

    return MEMORY.get(name, {})


def held_out(runs: Runs) -> np.ndarray:
    """Step times of all runs, each by constants fitted without its fold where its profile was fitted."""
    step = predict(runs.runs).step_s
    place = {id(run): i for i, run in enumerate(runs.runs)}
    for family in FAMILIES:
        fit = fit_of(family, runs)
        if not fit.runs:
            continue
        shipped = load_profile(family.name)
        solution = np.array([c.inner(float(getattr(shipped, c.name))) for c in fit.constants])
        for run, value in zip(fit.runs, out_of_fold(fit, solution, FOLDS, family.strength), strict=True):
            step[place[id(run)]] = value
    return step


def main() -> None:
    """Command line."""
    from accuracy_page import page

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs")
    parser.add_argument("--fit", nargs="*", metavar="PROFILE", help="fit these profiles (all when none is named)")
    parser.add_argument("--no-page", action="store_true")
    options = parser.parse_args()
    if options.fit is not None:
        for family in FAMILIES:
            if not options.fit or family.name in options.fit:
                fit_profile(family, read_runs(options.runs))
    if options.no_page:
        return
    runs = read_runs(options.runs)
    fitted = predict(runs.runs)
    step = held_out(runs)
    prediction = Prediction(step, fitted.memory_bytes, fitted.metered_bytes, fitted.usable_bytes)
    pipeline_one = Runs([r for r in runs.runs if r.config.pp == 1])
    at = np.array([i for i, r in enumerate(runs.runs) if r.config.pp == 1])
    without_pipeline = summarise(
        pipeline_one,
        Prediction(step[at], fitted.memory_bytes[at], fitted.metered_bytes[at], fitted.usable_bytes[at]),
    )
    PAGE.write_text(
        page(summarise(runs, prediction), summarise(runs, fitted), without_pipeline, runs), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
