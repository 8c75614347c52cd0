"""What every launcher shares: the launch it returns, the protocol it follows, a builder of argument lists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from parsolve.config import Config
from parsolve.errors import NotExpressibleError
from parsolve.problem import Problem


class ShellWord(str):
    """A constant piece of shell, such as a variable with its default, printed as it is; never made of user input."""

    __slots__ = ()


FIRST_HOST = ShellWord('"${MASTER_ADDR:-host0}:${MASTER_PORT:-29500}"')
"""Rendezvous of a run on several hosts: the environment's, else a name that no host answers to."""
TRIAL_STEPS = 10
"""Steps of a run for which no token budget is given."""


def quote(word: str) -> str:
    """A word that the shell hands on unchanged."""
    return str(word) if isinstance(word, ShellWord) else shlex.quote(word)


def expanded(word: str, environ: Mapping[str, str]) -> str:
    """A word with its shell variables replaced, as the shell would."""
    if not isinstance(word, ShellWord):
        return word
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: environ.get(found[1]) or found[2], word.strip('"'))


def train_steps(problem: Problem, config: Config) -> int:
    """Optimizer steps that use up the token budget, a few when there is none."""
    budget = problem.workload.train_tokens
    return TRIAL_STEPS if budget is None else -(-budget // (config.gbs * problem.workload.seq_len))


def shard_copies(problem: Problem, config: Config) -> int:
    """Shard groups that hold copies of each other; 1 where states are shared by all ranks or by none."""
    group, ranks = problem.workload.shard_group, config.dp * config.cp
    return 1 if group is None or config.zero == 0 else max(1, ranks // group)


@dataclass(frozen=True)
class Launch:
    """One ready launch.

    Parameters
    ----------
    env: environment variables, set on the line itself.
    argv: the program and its arguments, unquoted.
    files: text of the files that the line refers to, by file name.
    notes: what the user must know beside the line.
    config: the content of a JSON file among ``files``, for results in JSON.
    completed: files that the user fills in; a script leaves one alone that is there already.
    """

    env: dict[str, str]
    argv: list[str]
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    config: dict[str, Any] | None = None
    completed: frozenset[str] = frozenset()

    def line(self) -> str:
        """One shell line, every value quoted."""
        return " ".join([*self._assignments(), *map(quote, self.argv)])

    def script(self) -> str:
        """The same command over several lines, an option with its values on each."""
        lines = [" ".join([*self._assignments(), quote(self.argv[0])])]
        for word in self.argv[1:]:
            if word.startswith("-") or word.endswith(".py") or re.match(r"[a-z][\w.-]*[=:]", word):
                lines.append("    " + quote(word))
            else:
                lines[-1] += " " + quote(word)
        return " \\\n".join(lines)

    def to_json(self) -> str | dict[str, Any]:
        """The line; with a JSON file ``{"command": line, "config": content}``, with others ``files`` by name."""
        if self.config is not None:
            return {"command": self.line(), "config": self.config}
        return {"command": self.line(), "files": self.files} if self.files else self.line()

    def command(self, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """The argument list and the environment for ``subprocess``, which knows no shell variables.

        ``environ`` (say ``os.environ``) gives the variables that the line leaves to the shell; a default stands in for
        those that it lacks.
        """
        return [expanded(word, environ) for word in self.argv], {**environ, **self.env}

    def _assignments(self) -> list[str]:
        return [f"{name}={quote(value)}" for name, value in self.env.items()]


class Launcher(Protocol):
    """Turns a configuration into the command that trains with it.

    ``framework`` is the workload framework whose rules the launcher's lines obey.
    """

    name: str
    framework: str

    def launch(self, problem: Problem, config: Config) -> Launch:
        """The launch of one configuration.

        Raises
        ------
        NotExpressibleError: with the reason, when the plan or the model has no words in this launcher.
        """
        ...


class Arguments:
    """An argument list that knows from which version on each option exists, and the notes beside it.

    Parameters
    ----------
    program: how the program is called in messages.
    since: first version of each option; None: no versions.
    version: the version in force.
    """

    def __init__(
        self,
        program: str,
        since: Mapping[str, tuple[int, int]] | None = None,
        version: tuple[int, ...] = (),
    ) -> None:
        self.program, self.since, self.version = program, since, version
        self.words: list[str] = []
        self.notes: list[str] = []

    def has(self, option: str) -> bool:
        """The version in force has this option."""
        return self.since is None or self.version >= self.since[option]

    def add(self, option: str, *values: object, why: str = "") -> None:
        """Append an option with its values.

        Raises
        ------
        NotExpressibleError: the version in force does not have it.
        """
        if not self.has(option):
            first = ".".join(map(str, (self.since or {})[option]))
            reason = f"{why} needs {option}, which" if why else option
            raise NotExpressibleError(f"{reason} exists from {self.program} {first} on: raise --framework-version")
        self.words += [option, *(value if isinstance(value, str) else str(value) for value in values)]

    def note(self, text: str) -> None:
        """Tell the user something once."""
        if text not in self.notes:
            self.notes.append(text)


def torchrun(args: Arguments, problem: Problem) -> list[str]:
    """``torchrun`` with a process a GPU on every host, the same line everywhere."""
    hosts, processes = problem.cluster.hosts, problem.cluster.processes_per_host
    words = ["torchrun", "--nnodes", str(hosts), "--nproc-per-node", str(processes)]
    if hosts == 1:
        return [*words, "--standalone"]
    args.note(f"run the line on each of the {hosts} hosts, with MASTER_ADDR set to one of them")
    return [*words, "--rdzv-backend", "c10d", "--rdzv-endpoint", FIRST_HOST]


def add_megatron_schedule(args: Arguments, problem: Problem, config: Config) -> None:
    """Batch, steps, learning rate and evaluation, which Megatron-LM and Megatron-DeepSpeed spell alike."""
    args.add("--micro-batch-size", config.mbs)
    args.add("--global-batch-size", config.gbs)
    args.add("--train-iters", train_steps(problem, config))
    args.add("--lr", "1e-4")
    args.add("--min-lr", "1e-5")
    args.add("--lr-decay-style", "cosine")
    args.add("--weight-decay", "0.1")
    args.add("--clip-grad", "1.0")
    args.add("--log-interval", 1)
    args.add("--eval-interval", 1000)
    args.add("--eval-iters", 1)
