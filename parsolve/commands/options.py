"""Options that several commands share, and how their text becomes values and problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from parsolve import units
from parsolve.errors import SpecError

if TYPE_CHECKING:
    from parsolve.problem import Problem

    ParamType = click.ParamType[Any]  # generic for type checkers only
else:
    ParamType = click.ParamType

F = TypeVar("F", bound=Callable[..., Any])

FRAMEWORKS = ("megatron", "deepspeed", "torchtitan", "accelerate", "nemo", "generic")
SCHEDULES = ("1f1b", "gpipe", "zero-bubble", "zbv", "dualpipev")
QUANTIZED = ("weights", "gradients", "both")
PRECISIONS = ("bf16", "fp16", "fp8")
OPTIMIZERS = ("adam", "sgd")
WORKLOAD = (
    *("seq_len", "gbs", "gbs_tokens", "gbs_tolerance", "framework", "framework_version"),
    *("precision", "optimizer", "sequence_parallel", "memory_reserve", "train_tokens", "shard_group"),
    *("zero_quantized", "schedule", "mtp_layers"),
)


class Parsed(ParamType):
    """An option read by one of the parsers of ``parsolve.units``."""

    def __init__(self, name: str, parse: Callable[[object], Any], positive: bool = True) -> None:
        self.name, self.parse, self.positive = name, parse, positive

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value in SI base units."""
        try:
            number = self.parse(value)
        except SpecError as error:
            self.fail(error.message, param, ctx)
        if self.positive and number <= 0:
            self.fail("must be greater than 0", param, ctx)
        return number


class Top(ParamType):
    """How many plans: a number from 1 up, or ``all`` (0)."""

    name = "N|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """An int, or 0 for all: to click None means absent."""
        if isinstance(value, int):
            return value
        if str(value).strip().lower() == "all":
            return 0
        if not str(value).isdecimal() or not 1 <= int(value) <= 10**6:
            self.fail(f"{value!r} is neither a number from 1 up nor 'all'", param, ctx)
        return int(value)


class Modules(ParamType):
    """How many multi-token-prediction modules are trained: a number, or ``auto`` (None)."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """An int, or None for auto."""
        if isinstance(value, int) or str(value).strip().lower() == "auto":
            return value if isinstance(value, int) else None
        if not str(value).isdecimal() or int(value) > 16:
            self.fail(f"{value!r} is neither a number from 0 to 16 nor 'auto'", param, ctx)
        return int(value)


class Assignment(ParamType):
    """``axis=value`` or ``axis=value,value``."""

    name = "AXIS=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """(axis, text of the values)."""
        if isinstance(value, tuple):
            return value
        axis, equals, text = str(value).partition("=")
        if not equals or not axis.strip() or not text.strip():
            self.fail(f"cannot read {value!r}; write axis=value, for example tp=8 or tp=1,2,4", param, ctx)
        return axis.strip(), text.strip()


class Format(ParamType):
    """An output format; launchers come from their registry."""

    name = "FORMAT"

    def __init__(self, *fixed: str, launchers: bool = False) -> None:
        self.fixed, self.launchers = fixed, launchers

    def choices(self) -> tuple[str, ...]:
        """All names."""
        if not self.launchers:
            return self.fixed
        from parsolve.launchers import LAUNCHERS

        return (*self.fixed, *LAUNCHERS)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """The choices, as click shows them."""
        return f"[{'|'.join(self.choices())}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """One of the choices, or an error that lists them."""
        text = str(value).lower()
        if text not in self.fixed and text not in self.choices():
            from parsolve.errors import UnknownNameError

            self.fail(str(UnknownNameError("format", value, self.choices())), param, ctx)
        return text


COUNT = Parsed("COUNT", units.parse_count)
TOKENS = Parsed("TOKENS", units.parse_count)
SIZE = Parsed("SIZE", units.parse_bytes, positive=False)
FRACTION = Parsed("FRACTION", units.parse_fraction, positive=False)
DURATION = Parsed("TIME", units.parse_seconds)
ASSIGNMENT = Assignment()


def apply(*decorators: Callable[[Any], Any]) -> Callable[[F], F]:
    """One decorator from several; the first is shown first in --help."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


_PLACES = (click.argument("cluster"), click.argument("model"))
_LENGTH = click.option("--seq-len", type=COUNT, required=True, help="Sequence length, tokens.")
_WORKLOAD = (
    click.option("--gbs", type=COUNT, help="Global batch size, sequences."),
    click.option("--gbs-tokens", type=TOKENS, help="Global batch size, tokens: 4M is 4,000,000."),
    click.option("--gbs-tolerance", type=FRACTION, help="Allow any batch within this band of the target: 10%."),
    click.option("--framework", type=click.Choice(FRAMEWORKS), default="megatron", show_default=True),
    click.option("--framework-version", metavar="VERSION", help="Version whose rules apply, such as 0.19."),
    click.option("--precision", type=click.Choice(PRECISIONS), default="bf16", show_default=True),
    click.option("--optimizer", type=click.Choice(OPTIMIZERS), default="adam", show_default=True),
    click.option(
        "--sequence-parallel/--no-sequence-parallel",
        default=None,
        help="Divide token-wise work over tensor-parallel ranks.  [default: the framework's]",
    ),
    click.option(
        "--shard-group",
        type=COUNT,
        help="Hybrid sharding: ZeRO inside groups of so many neighbouring ranks, copies across them (DeepSpeed: hpZ).",
    ),
    click.option(
        "--zero-quantized",
        type=click.Choice(QUANTIZED),
        help="Send ZeRO-3's weights in 8 bits, its gradients in 4, or both; rounds them (DeepSpeed's ZeRO++).",
    ),
    click.option(
        "--schedule",
        type=click.Choice(SCHEDULES),
        default="1f1b",
        show_default=True,
        help="Pipeline schedule: 1F1B (interleaved when vpp > 1); GPipe, zero bubble (interleaved, or ZBV's two stages "
        "a rank), DualPipeV (torchtitan, generic).",
    ),
    click.option(
        "--mtp-layers",
        type=Modules(),
        default="auto",
        show_default=True,
        help="Multi-token-prediction modules to train; auto: the model's where the launcher can (megatron, nemo).",
    ),
    click.option("--memory-reserve", type=SIZE, default="0", help="Memory to keep free on every GPU: 6GiB."),
    click.option("--train-tokens", type=TOKENS, help="Token budget of the run: 2T; sets the steps in launch lines."),
    click.option("--profile", metavar="NAME|FILE", help="Efficiency constants.  [default: by framework and GPU]"),
    click.option("--text-only", is_flag=True, help="Of a multimodal config.json, plan the language model only."),
)
PROBLEM = apply(*_PLACES, _LENGTH, *_WORKLOAD)
OPEN_PROBLEM = apply(
    click.argument("cluster"),
    click.argument("model", required=False),
    click.option("--seq-len", type=COUNT, help="Sequence length, tokens."),
    *_WORKLOAD,
)
"""The same where a command line of today may say the model and the workload."""
RESTRICTIONS = apply(
    click.option("--pin", type=ASSIGNMENT, multiple=True, help="Allow only these values: tp=8, tp=1,2,4."),
    click.option("--forbid", type=ASSIGNMENT, multiple=True, help="Exclude values: recompute=full."),
    click.option("--max", "maximum", type=ASSIGNMENT, multiple=True, help="Largest value of an axis: pp=16."),
    click.option("--min", "minimum", type=ASSIGNMENT, multiple=True, help="Smallest value of an axis: mbs=2."),
    click.option("--require", multiple=True, metavar="CONDITION", help="A condition over axes: 'tp*cp <= 8'."),
)


def output_options(*formats: str, launchers: bool = False) -> Callable[[F], F]:
    """-f, --json, -o, -q, -v."""
    return apply(
        click.option(
            "-f", "--format", "format_", type=Format(*formats, launchers=launchers), default="table", show_default=True
        ),
        click.option("--json", "as_json", is_flag=True, help="Same as -f json."),
        click.option("-o", "--output", metavar="FILE", help="Write here instead of to stdout."),
        click.option("-q", "--quiet", is_flag=True, help="Nothing on stderr but errors."),
        click.option("-v", "--verbose", is_flag=True, help="Say more on stderr."),
    )


def build_problem(options: dict[str, Any]) -> Problem:
    """The problem that the options of ``PROBLEM`` and ``RESTRICTIONS`` describe."""
    given = [name for name in ("gbs", "gbs_tokens") if options[name] is not None]
    if len(given) != 1:
        fault = "give only one of --gbs and --gbs-tokens" if given else "how large is the global batch?"
        raise click.UsageError(f"{fault} (--gbs 1024 in sequences, or --gbs-tokens 4M)")
    from parsolve.expressions import require_rule
    from parsolve.loading import load_model
    from parsolve.problem import Problem
    from parsolve.restrictions import restrict

    problem = Problem(
        cluster=options["cluster"],
        model=load_model(options["model"], options["text_only"]),
        profile=options["profile"],
        **{name: options[name] for name in WORKLOAD},
    )
    return restrict(
        problem,
        pin=_axes(options["pin"], "--pin"),
        forbid=_axes(options["forbid"], "--forbid"),
        maximum=_axes(options["maximum"], "--max"),
        minimum=_axes(options["minimum"], "--min"),
        extra=[require_rule(text) for text in _distinct(options["require"])],
    )


def _axes(pairs: Sequence[tuple[str, str]], flag: str) -> dict[str, str]:
    """Text of the values by axis; several --forbid of an axis add up, for the others they would be a riddle."""
    from parsolve.restrictions import axis_name

    found: dict[str, str] = {}
    for raw, text in pairs:
        axis = axis_name(raw, flag)
        if axis in found and found[axis] != text:
            if flag != "--forbid":
                mend = f"; write {flag} {axis}={found[axis]},{text}" if flag == "--pin" else ""
                raise SpecError(f"{axis} is given twice{mend}", flag)
            text = f"{found[axis]},{text}"
        found[axis] = text
    return found


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(text.strip() for text in texts))


def output_path(text: str | None) -> Path | None:
    """-o as a path; '-' is stdout."""
    return None if text in (None, "-") else Path(str(text))
