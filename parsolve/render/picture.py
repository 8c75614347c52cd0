"""Pictures by matplotlib, which is optional."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsolve.errors import SpecError

if TYPE_CHECKING:
    from parsolve.result import Plan


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files only.

    Raises
    ------
    SpecError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise SpecError("needs matplotlib: pip install matplotlib", "--plot") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as module

    return module


def save(figure: Any, path: Path) -> None:
    """Write and close a figure; the format follows the file's ending (png, svg, pdf).

    Raises
    ------
    SpecError: it cannot be written.
    """
    try:
        figure.tight_layout()
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot be written: {error}", f"--plot {path}") from None
    finally:
        pyplot().close(figure)


HATCHES = ("", "//", "\\\\", "..", "xx", "--", "oo", "++", "**")


def memory_picture(plan: Plan, path: Path) -> None:
    """Memory of every pipeline rank as stacked bars by part, with the limit as a line; hatched, so not by colour alone.

    Raises
    ------
    SpecError: matplotlib is not installed, or the file cannot be written.
    """
    stages, limit = plan.stages, plan.estimate.memory_bytes["limit"] / 2**30
    names = list(dict.fromkeys(name for stage in stages for name, amount in stage.parts.items() if amount))
    figure, axes = pyplot().subplots(figsize=(min(24.0, max(6.0, 3.0 + 0.4 * len(stages))), 5))
    ranks, below = [stage.rank for stage in stages], [0.0] * len(stages)
    for index, name in enumerate(names):
        heights = [stage.parts.get(name, 0.0) / 2**30 for stage in stages]
        hatch = HATCHES[index % len(HATCHES)]
        axes.bar(ranks, heights, bottom=below, label=name, hatch=hatch, edgecolor="black", linewidth=0.3)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.set_ylim(0, 1.05 * max(limit, *below))
    axes.axhline(limit, color="black", linestyle="--", label=f"limit {limit:.2f} GiB")
    axes.set(
        xlabel="pipeline rank (layers)", ylabel="memory, GiB", title=f"{plan.problem.model.name}, plan {plan.rank}"
    )
    if len(ranks) <= 32:
        layers = [str(sum(chunks)) for chunks in plan.config.layers_per_stage]
        if plan.problem.mtp_layers:
            layers[plan.config.mtp_rank] += f" + {plan.problem.mtp_layers} MTP"
        axes.set_xticks(ranks, [f"{rank}\n({n})" for rank, n in zip(ranks, layers, strict=True)])
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)
