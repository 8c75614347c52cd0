"""Launchers by name. A new one is a file here and a line in ``LAUNCHERS``."""

from __future__ import annotations

from collections.abc import Mapping

from parsolve.config import Config
from parsolve.constraints import RULES
from parsolve.constraints.pipeline import WITHOUT_BLOCK
from parsolve.errors import NotExpressibleError, SpecError, UnknownNameError
from parsolve.evaluation import axis_values, instance_of
from parsolve.launchers.accelerate import AccelerateLauncher
from parsolve.launchers.base import Launch, Launcher
from parsolve.launchers.deepspeed import DeepSpeedLauncher
from parsolve.launchers.megatron import MegatronLauncher
from parsolve.launchers.nemo import NemoLauncher
from parsolve.launchers.torchtitan import TorchtitanLauncher
from parsolve.problem import Problem, replace_workload
from parsolve.specs import Recompute

_ALL: tuple[Launcher, ...] = (
    MegatronLauncher(),
    DeepSpeedLauncher(),
    TorchtitanLauncher(),
    AccelerateLauncher(),
    NemoLauncher(),
)
LAUNCHERS: Mapping[str, Launcher] = {launcher.name: launcher for launcher in _ALL}


def launch(name: str, problem: Problem, config: Config) -> Launch:
    """The launch of a configuration by one launcher.

    A plan made for another framework is first held against the launcher's own rules.

    Raises
    ------
    NotExpressibleError: with the reason, when the launcher has no words for the plan or the model.
    UnknownNameError: no such launcher.
    """
    if name not in LAUNCHERS:
        raise UnknownNameError("launcher", name, LAUNCHERS)
    launcher = LAUNCHERS[name]
    if problem.workload.framework != launcher.framework:
        problem = _translated(problem, config, launcher.framework)
    if config.recompute == Recompute.BLOCK and launcher.framework in WITHOUT_BLOCK:
        raise NotExpressibleError(f"recompute=block: {name} recomputes all layers of a stage or none")
    return launcher.launch(problem, config)


def _translated(problem: Problem, config: Config, framework: str) -> Problem:
    """The problem under another framework, whose rules the configuration must keep."""
    try:
        other = replace_workload(
            problem,
            framework=framework,
            framework_version=None,
            mtp_layers=problem.mtp_layers,
            sequence_parallel=config.sequence_parallel if config.tp > 1 else None,
        )
    except SpecError as error:
        raise NotExpressibleError(str(error)) from None
    p = instance_of(other, config)
    values = axis_values(p, config)
    for rule in RULES:
        if rule.applies(other.workload) and rule.role != "canonical" and not bool(rule(p, values)):
            raise NotExpressibleError(rule.explain(p, values))
    return other


__all__ = ["LAUNCHERS", "Launch", "Launcher", "NotExpressibleError", "launch"]
