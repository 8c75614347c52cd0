"""Fits the shipped profiles and writes docs/accuracy.md from a table of published runs.

python docs/generate_accuracy.py RUNS.csv            # the page, from the profiles as they are
python docs/generate_accuracy.py RUNS.csv --fit      # fit the profiles first (some minutes), then the page
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
from accuracy_memory import FITTED_MEMORY, MEMORY, MemoryFit, weighed

from parsolve.calibration import FITTED, Constant, Fit, equal_weights, fold_of, out_of_fold
from parsolve.functions import Array
from parsolve.profiles import load_profile, reload_profiles
from parsolve.validation import Prediction, Runs, predict, read_runs, summarise
from parsolve.validation.profile_file import write_profile
from parsolve.validation.runs import Run

PROFILES = Path(__file__).parents[1] / "parsolve" / "data" / "profiles"
PAGE = Path(__file__).with_name("accuracy.md")
FOLDS = 5


POOLED = 5.0
"""The pull of the prior where stacks or clusters share constants, or each run is one noisy iteration; 1 elsewhere."""


@dataclass(frozen=True)
class Family:
    """A shipped profile: what it starts from, what is set by knowledge of the stack, and which constants are fitted.

    ``members`` makes it a base that is fitted on the runs of all these profiles together. ``strength`` is how strongly
    the prior pulls.
    """

    name: str
    comment: str
    base: str = "default"
    members: tuple[str, ...] = ()
    known: dict[str, tuple[float, str]] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    add: tuple[str, ...] = ()
    strength: float = 1.0

    def constants(self) -> list[Constant]:
        """The constants that are fitted."""
        if self.only:
            return [c for c in FITTED if c.name in self.only]
        left_out = {*SPECIAL, *self.without} - set(self.add)
        return [c for c in FITTED if c.name not in left_out]

    @property
    def values(self) -> dict[str, float]:
        """The values of what is known."""
        return {name: value for name, (value, _) in self.known.items()}


SPECIAL = ("pipelined_member_time", "shard_member_time", "tp_overlap")
"""Constants of single stacks, zero for the others."""
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
FUSED = {"accumulation_bytes": (6.0, "added in the weight-gradient product, which reads 4 and writes 4 bytes, not 2")}
FSDP = {**WHOLE, "reduction_bytes": HALF["reduction_bytes"]}
FAMILIES = (
    Family(
        "ampere",
        "A100 and A800, whatever the software: the base of the stacks on this hardware.",
        members=(
            "megatron-ampere",
            "aa-scaling-ampere",
            "megatron-deepspeed-ampere",
            "fsdp-ampere",
            "internevo-ampere",
        ),
        strength=POOLED,
    ),
    Family(
        "hopper",
        "H100, H200, H800, whatever the software: the base of the stacks on this hardware.",
        members=("megatron-hopper", "fsdp-hopper"),
        strength=POOLED,
    ),
    Family(
        "megatron-ampere",
        "Megatron-LM, Megatron-Core and close relatives on A100 and A800.",
        "ampere",
        known=FUSED,  # most stacks of the base add gradients in passes of their own
    ),
    Family("aa-scaling-ampere", "Aleph Alpha's own trainer on A100: eager PyTorch, few fused kernels.", "ampere"),
    Family(
        "megatron-hopper", "Megatron-Core and NeMo on H100, H200, H800.", "hopper", known=TUNED, add=("tp_overlap",)
    ),
    Family(
        "megatron-blackwell",
        "Megatron-Core and Megatron-Bridge on B200, B300, GB200, GB300.",
        "hopper",
        known=TUNED,
        add=("tp_overlap",),
    ),
    Family(
        "megatron-deepspeed-ampere",
        "Megatron-DeepSpeed of 2022 and later on A100: fused softmax, full recomputation.",
        "ampere",
        known={
            **HALF,
            "launch_time": (2e-5, "assumed start: eager PyTorch"),
            "dp_overlap": (0.0, "the pipeline engine reduces gradients after the last backward pass"),
        },
        without=("dp_overlap", "attention_efficiency", "attention_backward_efficiency"),
        strength=POOLED,
    ),
    Family(
        "megatron-deepspeed-blocking-ampere",
        "Megatron-DeepSpeed with CUDA_LAUNCH_BLOCKING=1: nothing overlaps and collectives wait for the host.",
        "megatron-deepspeed-ampere",
        only=("launch_time", "step_overhead", "nic_efficiency", "p2p_efficiency"),
    ),
    Family("fsdp-ampere", "PyTorch FSDP (llm-foundry, torchtitan, fms-fsdp) on A100.", "ampere", known=FSDP),
    # not over the base, in which tuned fp8 recipes weigh: with it the error out of fold is half as large again
    Family("fsdp-hopper", "PyTorch FSDP (llm-foundry, torchtitan, fms-fsdp) on H100, H200.", known=FSDP),
    Family(
        "nanotron-hopper",
        "nanotron on H100: eager PyTorch, little overlap, slow launches when stages and tensor parallelism meet.",
        "hopper",
        known={
            **WHOLE,
            "launch_time": (5e-5, "assumed start: eager PyTorch"),
            "pipelined_member_time": (2e-3, "assumed start"),
        },
        add=("pipelined_member_time",),
        strength=POOLED,
    ),
    Family(
        "internevo-ampere",
        "InternEvo on A100 and A800.",
        "ampere",
        known={**WHOLE, "shard_member_time": (1e-3, "assumed start")},
        add=("shard_member_time",),
    ),
    Family("oneflow-volta", "OneFlow on V100.", "ampere", known=HALF),
)
BY_NAME = {family.name: family for family in FAMILIES}


def timed(runs: Runs, profiles: Collection[str]) -> list[Run]:
    """The runs of some profiles that carry a step time and may be used for it."""
    return [r for r in runs.runs if r.problem.profile.name in profiles and "time" in r.uses and r.step_s]


def fit_of(family: Family, runs: Runs) -> Fit:
    """The fit of a family: prior, constants, runs and weights."""
    start = load_profile(family.base).model_copy(update=family.values)
    mine = timed(runs, family.members or (family.name,))
    own = {name: BY_NAME[name].values for name in family.members}
    for values in own.values():  # a base hands over gradients in one way: without Megatron's runs it runs to its bound
        values.pop("accumulation_bytes", None)
    return Fit(mine, start, family.constants(), equal_weights(mine), own)


def fit_profile(family: Family, runs: Runs) -> None:
    """Fit one profile and write its file; constants that the runs did not move stay with the base."""
    fit = fit_of(family, runs)
    solution = fit.solve(strength=family.strength)
    sources = ", ".join(sorted({run.source for run in fit.runs}))
    moved = {
        c.name: (c.outer(value), f"fitted on {len(fit.runs)} runs of {sources}")
        for c, value, prior in zip(fit.constants, solution, fit.prior, strict=True)
        if abs(value - prior) > MOVED * c.width
    }
    keep = memory_constants(family, runs)
    write_profile(
        PROFILES / f"{family.name}.toml", family.name, family.base, family.comment, {**family.known, **moved, **keep}
    )
    reload_profiles()


PARTS = tuple(f.name for f in fields(Prediction))
MOVED = 0.1
"""A constant that its runs move by less than this share of the prior's width stays with the base."""


def memory_fit_of(family: Family, runs: Runs) -> MemoryFit:
    """The fit of a family's memory constants: what is known of the stack is where it starts from."""
    known = {name: value for name, (value, _) in MEMORY.get(family.name, {}).items()}
    start = load_profile(family.base).model_copy(update={**family.values, **known})
    return MemoryFit(weighed(runs.runs, family.name), start)


def memory_constants(family: Family, runs: Runs) -> dict[str, tuple[float, str]]:
    """Memory constants of the stack and hardware: known ones, and those that peaks and outcomes move."""
    known = MEMORY.get(family.name, {})
    fit = memory_fit_of(family, runs)
    if not fit.runs:
        return known
    sources = ", ".join(sorted({run.source for run in fit.runs}))
    origin = f"fitted on the peaks and outcomes of {len(fit.runs)} runs of {sources}"
    fitted = {
        c.name: (c.outer(value), origin)
        for c, value, prior in zip(FITTED_MEMORY, fit.solve(), fit.prior, strict=True)
        if abs(value - prior) > MOVED * c.width
    }
    return {**known, **fitted}


class HeldOut:
    """Step times by constants that have not seen a run's group, neither in its profile's fit nor in its base's."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.bases = {family.name: self._base(family) for family in FAMILIES if family.members}

    def _base(self, family: Family) -> tuple[list[Run], Array, dict[int, dict[str, float]]]:
        """The runs of a base, their folds, and the base's constants without each fold."""
        fit = fit_of(family, self.runs)
        at, start = fold_of(fit.runs, FOLDS), shipped(fit, family.name)
        jacobian = fit.jacobian(start)
        values = {}
        for fold in range(FOLDS):
            variables = fit.refit(start, jacobian, at != fold, rounds=5, strength=family.strength)
            values[fold] = {c.name: c.outer(v) for c, v in zip(fit.constants, variables, strict=True)}
        return fit.runs, at, values

    def step_s(self) -> Array:
        """Step times of all runs, s; of those whose profile is not fitted, by the shipped one."""
        step = predict(self.runs.runs).step_s
        place = {id(run): i for i, run in enumerate(self.runs.runs)}
        for family in FAMILIES:
            fit = fit_of(family, self.runs)
            if family.members or not fit.runs:
                continue
            for run, value in zip(fit.runs, self._family(family, fit), strict=True):
                step[place[id(run)]] = value
        return step

    def memory(self) -> tuple[Array, Array]:
        """Memory of the worst stage and as the meter reads it, bytes, by constants fitted without a run's group."""
        seen = predict(self.runs.runs)
        total, metered = seen.memory_bytes, seen.metered_bytes
        place = {id(run): i for i, run in enumerate(self.runs.runs)}
        for family in FAMILIES:
            fit = memory_fit_of(family, self.runs)
            if family.members or not fit.runs:
                continue
            at = fold_of(fit.runs, FOLDS)
            start = np.array([c.inner(float(getattr(load_profile(family.name), c.name))) for c in FITTED_MEMORY])
            where = np.array([place[id(run)] for run in fit.runs])
            for fold in np.unique(at):
                here = at == fold
                variables = fit.prior if here.all() else fit.refit(start, ~here)
                whole, read, _ = fit.predicted(variables)
                total[where[here]], metered[where[here]] = whole[here], read[here]
        return total, metered

    def _family(self, family: Family, fit: Fit) -> Array:
        solution = shipped(fit, family.name)
        if family.name not in BY_NAME.get(family.base, family).members:
            return out_of_fold(fit, solution, FOLDS, family.strength)
        runs, folds, bases = self.bases[family.base]
        fold = {id(run): int(at) for run, at in zip(runs, folds, strict=True)}
        at = np.array([fold[id(run)] for run in fit.runs])
        jacobian = fit.jacobian(solution)
        result = np.zeros(len(fit.runs))
        for number in np.unique(at):
            start = {**bases[int(number)], **family.values}
            fit.rebase(fit.profile.model_copy(update=start))
            variables = fit.refit(solution, jacobian, at != number, rounds=5, strength=family.strength)
            result[at == number] = fit.predicted(variables)[at == number]
        return result


def shipped(fit: Fit, name: str) -> Array:
    """The fitted variables as they are shipped."""
    profile = load_profile(name)
    return np.array([c.inner(float(getattr(profile, c.name))) for c in fit.constants])


def part(runs: Runs, prediction: Prediction, keep: Callable[[Run], bool]) -> tuple[Runs, Prediction]:
    """Some of the runs and what is predicted for them."""
    at = np.array([i for i, run in enumerate(runs.runs) if keep(run)])
    return Runs([runs.runs[i] for i in at]), Prediction(*(getattr(prediction, name)[at] for name in PARTS))


def main() -> None:
    """Command line."""
    from accuracy_page import drained, drained_rows, page

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
    held_out = HeldOut(runs)
    memory, metered = held_out.memory()
    unseen = Prediction(held_out.step_s(), memory, metered, fitted.usable_bytes)
    one_stage = summarise(*part(runs, unseen, lambda run: run.config.pp == 1))
    others = summarise(*part(runs, unseen, lambda run: not drained(run)))
    odd = drained_rows(*part(runs, unseen, drained), others["sources"]["aleph_alpha_2023"])
    text = page(summarise(runs, unseen), summarise(runs, fitted), one_stage, odd, runs)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
