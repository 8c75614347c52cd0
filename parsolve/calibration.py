"""Fitting a profile's efficiency constants to measured step times: robust, bounded, with the profile as the prior.

The residual of a run is log(predicted / measured). Constants are fitted in log space (shares of overlap as they are),
inside their range, with a pull towards the profile that they start from, so that what the runs say nothing about stays
where it was.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parsolve.errors import SpecError
from parsolve.functions import Array
from parsolve.specs import Profile
from parsolve.specs.profile import CONSTANTS
from parsolve.validation.prediction import Batch, batches
from parsolve.validation.runs import Run


@dataclass(frozen=True)
class Constant:
    """How one constant is fitted: its bounds, whether in log space, and the prior's width in that space."""

    name: str
    low: float
    high: float
    width: float
    log: bool = True

    def inner(self, value: float) -> float:
        """The fitted variable."""
        clipped = min(max(value, self.low), self.high)
        return float(np.log(clipped)) if self.log else clipped

    def outer(self, variable: float) -> float:
        """The constant."""
        return float(np.exp(variable)) if self.log else float(variable)


FITTED = (
    Constant("gemm_efficiency", 0.30, 0.95, 0.15),
    Constant("low_precision_gemm_efficiency", 0.20, 0.90, 0.2),
    Constant("gemm_half_tiles", 4.0, 512.0, 0.7),
    Constant("gemm_half_depth", 8.0, 1024.0, 1.0),
    Constant("grouped_gemm_efficiency", 0.3, 1.0, 0.2),
    Constant("attention_efficiency", 0.15, 0.80, 0.2),
    Constant("attention_backward_efficiency", 0.10, 0.75, 0.2),
    Constant("memory_efficiency", 0.40, 0.95, 0.15),
    Constant("elementwise_traffic", 0.5, 6.0, 0.5),
    Constant("loss_traffic", 8.0, 120.0, 0.5),
    Constant("accumulation_bytes", 1.0, 20.0, 0.4),
    Constant("optimizer_traffic", 1.0, 10.0, 0.5),
    Constant("kernel_overhead", 2e-7, 4e-5, 0.7),
    Constant("launch_time", 5e-7, 1e-4, 0.7),
    Constant("fast_link_efficiency", 0.2, 0.95, 0.2),
    Constant("nic_efficiency", 0.1, 0.98, 0.4),
    Constant("p2p_efficiency", 0.05, 0.98, 0.6),
    Constant("collective_overhead", 1e-6, 5e-4, 0.8),
    Constant("p2p_overhead", 1e-6, 2e-2, 1.0),
    Constant("pipelined_member_time", 0.0, 1e-2, 3e-3, log=False),
    Constant("shard_member_time", 0.0, 2e-2, 3e-3, log=False),
    Constant("tp_overlap", 0.0, 0.95, 0.3, log=False),
    Constant("cp_overlap", 0.0, 1.0, 0.3, log=False),
    Constant("ep_overlap", 0.0, 0.95, 0.3, log=False),
    Constant("p2p_overlap", 0.0, 1.0, 0.3, log=False),
    Constant("dp_overlap", 0.0, 1.0, 0.3, log=False),
    Constant("gather_overlap", 0.0, 1.0, 0.3, log=False),
    Constant("step_overhead", 1e-4, 1.0, 1.0),
)
"""Constants that step times can determine, in the order of the profile."""
NOISE = 0.03
"""What a repeat of a run differs by: errors well above it count linearly, not squared."""


@dataclass
class _State:
    """Where a descent stands."""

    x: Array
    cost: float
    errors: Array
    damping: float = 1e-2


class Fit:
    """Runs of one profile, their measured times and weights, ready to be evaluated with other constants."""

    def __init__(
        self,
        runs: Sequence[Run],
        profile: Profile,
        constants: Sequence[Constant],
        weights: Array | None = None,
        own: Mapping[str, Mapping[str, float]] | None = None,
    ):
        self.runs, self.constants = list(runs), tuple(constants)
        self.own = own or {}  # constants that stay as they are for the runs of a profile, by its name
        self.prepared: list[Batch] = batches(self.runs)
        self.measured = np.array([run.step_s or np.nan for run in self.runs])
        self.weights = np.ones(len(self.runs)) if weights is None else weights
        self.widths = np.array([c.width for c in self.constants])
        self.low = np.array([c.inner(c.low) for c in self.constants])
        self.high = np.array([c.inner(c.high) for c in self.constants])
        self.rebase(profile)

    def rebase(self, profile: Profile) -> None:
        """Take another profile as the prior; what schedules add to the pipeline's bound is kept as it is there."""
        self.profile = profile
        for batch in self.prepared:
            p = batch.instance(batch.problem)
            p.profile = profile.model_copy(update=self.own.get(batch.problem.profile.name, {}))
            batch.stretch = batch.exact_stretch(p)
        self.prior = np.array([c.inner(float(getattr(profile, c.name))) for c in self.constants])

    def with_values(self, variables: Array) -> Profile:
        """The profile with fitted variables put in."""
        values = {c.name: c.outer(v) for c, v in zip(self.constants, variables, strict=True)}
        return self.profile.model_copy(update=values)

    def predicted(self, variables: Array) -> Array:
        """Step times, s: of each run, or, for a table of variables, (row of the table, run)."""
        if variables.ndim == 1:
            profile = self.with_values(variables)
        else:  # the formulas broadcast: a constant may be a column, a row of the result for each of its values
            columns = {
                c.name: np.array([[c.outer(v)] for v in column])
                for c, column in zip(self.constants, variables.T, strict=True)
            }
            profile = self.profile.model_copy(update=columns)
        result = np.zeros((*variables.shape[:-1], len(self.runs)))
        for batch in self.prepared:
            p = batch.instance(batch.problem)
            p.profile = profile.model_copy(update=self.own.get(batch.problem.profile.name, {}))
            result[..., batch.at] = batch.step_s(p)
        return result

    def errors(self, variables: Array) -> Array:
        """log(predicted / measured), shaped as ``predicted``."""
        result: Array = np.log(self.predicted(variables) / self.measured)
        return result

    def jacobian(self, variables: Array) -> Array:
        """Forward differences of ``errors``, inwards at the upper bound, by small parts of the priors' widths."""
        steps = 0.02 * self.widths
        steps = np.where(variables + steps > self.high, -steps, steps)
        errors = self.errors(np.vstack((variables, variables + np.diag(steps))))
        result: Array = ((errors[1:] - errors[0]) / steps[:, None]).T
        return result

    def solve(
        self, start: Array | None = None, keep: Array | None = None, rounds: int = 12, strength: float = 1.0
    ) -> Array:
        """Bounded, damped Gauss-Newton with Huber weights; ``keep`` masks the runs that count.

        Minimises the sum of weights*huber(error / NOISE) + strength*(shift / width)^2.
        """
        mask = np.ones(len(self.runs), bool) if keep is None else keep
        x = np.array(self.prior if start is None else start)
        state = _State(x, *self.cost(x, mask, strength))
        for _ in range(rounds):
            if not self._descend(state, self.jacobian(state.x), mask, strength):
                break
        return state.x

    def refit(self, start: Array, jacobian: Array, keep: Array, rounds: int = 3, strength: float = 1.0) -> Array:
        """As ``solve`` near a known solution, with its Jacobian throughout: what leaving runs out changes."""
        state = _State(np.array(start), *self.cost(start, keep, strength))
        for _ in range(rounds):
            if not self._descend(state, jacobian, keep, strength):
                break
        return state.x

    def _descend(self, state: _State, jacobian: Array, mask: Array, strength: float) -> bool:
        """One accepted step, tried with growing damping; False when nothing better was found."""
        from scipy.optimize import lsq_linear

        scale = self._row_scale(state.errors, mask)
        pull = np.sqrt(strength) / self.widths
        for _ in range(5):
            damp = np.sqrt(state.damping) / self.widths
            a = np.vstack((jacobian * scale[:, None], np.diag(pull), np.diag(damp)))
            b = np.concatenate((-state.errors * scale, -(state.x - self.prior) * pull, np.zeros(len(pull))))
            shift = lsq_linear(a, b, (self.low - state.x - 1e-9, self.high - state.x + 1e-9)).x
            trial = np.clip(state.x + shift, self.low, self.high)
            cost, errors = self.cost(trial, mask, strength)
            if cost < state.cost:
                gain = state.cost - cost
                state.x, state.cost, state.errors = trial, cost, errors
                state.damping = max(state.damping / 5, 1e-4)
                return gain > 1e-4 * cost
            state.damping *= 10
        return False

    def determined(self) -> tuple[Constant, ...]:
        """A largest set of constants that the runs tell apart: each narrowed to DETERMINED of its prior's width.

        Greedy, the most sensitive first. Linearised around the start with measurement noise NOISE and the priors, the
        covariance of a set of constants is (J'J/NOISE^2 + 1/width^2)^-1.
        """
        scaled = self.jacobian(self.prior) * self.widths * np.sqrt(self.weights)[:, None] / NOISE
        information = scaled.T @ scaled
        chosen: list[int] = []
        for i in np.argsort(-np.diag(information)):
            trial = [*chosen, int(i)]
            covariance = np.linalg.inv(information[np.ix_(trial, trial)] + np.eye(len(trial)))
            if np.sqrt(np.diag(covariance)).max() <= DETERMINED:
                chosen = trial
        return tuple(c for i, c in enumerate(self.constants) if i in chosen)

    def _row_scale(self, errors: Array, mask: Array) -> Array:
        size = np.maximum(np.abs(errors) / NOISE, 1.0)
        return np.sqrt(self.weights * mask / size) / NOISE

    def cost(self, variables: Array, mask: Array, strength: float) -> tuple[float, Array]:
        """The objective and the errors."""
        errors = self.errors(variables)
        z = np.abs(errors) / NOISE
        loss = np.where(z <= 1, z**2, 2 * z - 1)
        pull = float((((variables - self.prior) / self.widths) ** 2).sum())
        return float((self.weights * mask * loss).sum()) + strength * pull, errors


SMALL = 20
"""A source with fewer runs than this counts for less than a whole one."""


def equal_weights(runs: Sequence[Run]) -> Array:
    """Weights that let sources count the same from SMALL runs up, and below that by their runs; their mean is 1."""
    sizes: dict[str, int] = {}
    for run in runs:
        sizes[run.source] = sizes.get(run.source, 0) + 1
    weights = np.array([1.0 / max(SMALL, sizes[run.source]) for run in runs])
    result: Array = weights / weights.mean() if len(runs) else weights
    return result


def fold_of(runs: Sequence[Run], folds: int, seed: int = 0) -> Array:
    """The fold of each run: whole groups together, so that no layout is predicted from its neighbours."""
    names = sorted({f"{run.source}|{run.group}" for run in runs})
    order = np.random.default_rng(seed).permutation(len(names))
    fold = {names[at]: i % folds for i, at in enumerate(order)}
    return np.array([fold[f"{run.source}|{run.group}"] for run in runs])


def out_of_fold(fit: Fit, solution: Array, folds: int, strength: float = 1.0) -> Array:
    """Step times where each run is predicted by constants that were fitted without its fold, s."""
    at = fold_of(fit.runs, folds)
    jacobian = fit.jacobian(solution)
    result = np.zeros(len(fit.runs))
    for fold in np.unique(at):
        held_out = at == fold
        if held_out.all():
            variables = fit.prior
        else:
            variables = fit.refit(solution, jacobian, ~held_out, rounds=5, strength=strength)
        result[held_out] = fit.predicted(variables)[held_out]
    return result


@dataclass(frozen=True)
class Calibration:
    """A fitted profile and what it is worth.

    ``before`` and ``after`` are median errors of runs that the constants were not fitted on; ``fitted`` maps a
    constant to its value before and after; ``undetermined`` are those that the runs say nothing about.
    """

    profile: Profile
    text: str
    runs: int
    before: float
    after: float
    fitted: dict[str, tuple[float, float]]
    undetermined: tuple[str, ...]

    def report(self) -> list[str]:
        """Lines for a reader."""
        lines = [
            f"{self.runs} runs; median error {100 * self.before:.1f} % before, {100 * self.after:.1f} % after, "
            "on runs left out of the fit"
        ]
        if not self.fitted:
            lines.append("nothing was fitted: the constants as they are predict left-out runs at least as well")
        lines += [f"fitted: {name} {old:.4g} -> {new:.4g}" for name, (old, new) in self.fitted.items()]
        if self.undetermined:
            lines.append(f"left as they were, the runs do not determine them: {', '.join(self.undetermined)}")
        return lines


FEWEST = 3
"""Runs below which nothing is fitted."""
STRENGTHS = (1.0, 8.0)
"""How strongly the prior may pull, relative to its stated widths."""
DETERMINED = 0.7
"""A constant counts as determined when the runs narrow it to this share of its prior's width."""


def calibrate(runs: Sequence[Run], name: str = "calibrated") -> Calibration:
    """Fit the constants of the runs' profile to their step times.

    Only constants that the runs determine are fitted, one more at a time cannot be told apart from another; the prior
    keeps the rest. How strongly it pulls is chosen by the error of runs left out in turn; where no fit predicts those
    better, every constant stays as it was.

    Raises
    ------
    SpecError: fewer than 3 timed runs, runs of several profiles, or runs that determine no constant.
    """
    timed = [run for run in runs if run.step_s]
    if len(timed) < FEWEST:
        raise SpecError(f"{len(timed)} runs have a step time; at least {FEWEST} are needed", "calibrate")
    names = sorted({run.problem.profile.name for run in timed})
    if len(names) > 1:
        raise SpecError(
            f"the runs belong to several stacks or GPU families ({', '.join(names)}): calibrate each apart with "
            "--where or start all from one with --profile",
            "calibrate",
        )
    base = timed[0].problem.profile
    whole = Fit(timed, base, FITTED)
    chosen = whole.determined()
    if not chosen:
        raise SpecError("the runs determine none of the constants", "calibrate")
    fit = Fit(timed, base, chosen)
    before = float(np.median(np.abs(np.expm1(fit.errors(fit.prior)))))
    best, after = fit.prior, before
    for pull in STRENGTHS:
        solution = fit.solve(rounds=8, strength=pull)
        left_out = float(np.median(np.abs(_leave_out(fit, solution, pull) / fit.measured - 1.0)))
        if left_out < after:
            best, after = solution, left_out
    fitted = {
        c.name: (float(getattr(base, c.name)), c.outer(value))
        for c, value, prior in zip(chosen, best, fit.prior, strict=True)
        if value != prior
    }
    origin = f"fitted on {len(timed)} own runs"
    known = {key: (new, origin) for key, (_, new) in fitted.items()}
    profile, text = _file(base, name, known)
    kept = tuple(c.name for c in FITTED if c.name not in fitted)
    return Calibration(profile, text, len(timed), before, after, fitted, kept)


def _leave_out(fit: Fit, solution: Array, strength: float) -> Array:
    """Step times, each predicted by constants fitted without it (or without its fifth of the runs)."""
    size = len(fit.runs)
    at = np.arange(size) if size < 10 else np.random.default_rng(0).permutation(np.arange(size) % 5)
    jacobian = fit.jacobian(solution)
    result = np.zeros(size)
    for part in np.unique(at):
        variables = fit.refit(solution, jacobian, at != part, rounds=5, strength=strength)
        result[at == part] = fit.predicted(variables)[at == part]
    return result


def _file(base: Profile, name: str, known: dict[str, tuple[float, str]]) -> tuple[Profile, str]:
    """The profile and its file: over a shipped base where there is one, else with every constant."""
    from parsolve.profiles import load_profile, profile_names, read_profile
    from parsolve.validation.profile_file import profile_text

    shipped = base.name in profile_names() and load_profile(base.name) == base
    if not shipped:
        rest = {
            key: (float(getattr(base, key)), base.sources.get(key, f"from {base.name}"))
            for key in CONSTANTS
            if getattr(base, key) is not None
        }
        known = {**rest, **known}
    text = profile_text(name, base.name if shipped else None, "Calibrated with parsolve calibrate.", known)
    return read_profile(tomllib.loads(text), name), text
