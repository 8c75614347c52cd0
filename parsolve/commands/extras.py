"""--plot and --trace: files written beside the answer, about its first plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from parsolve.commands.options import apply
from parsolve.errors import SpecError

if TYPE_CHECKING:
    from parsolve.commands.output import Output
    from parsolve.result import Result

EXTRAS = apply(
    click.option("--plot", metavar="FILE", help="Picture of the memory of every stage by part: png, svg or pdf."),
    click.option("--trace", metavar="FILE", help="Chrome trace of the pipeline's schedule in one step."),
)


def check_extras(options: Mapping[str, Any]) -> None:
    """Refuse what cannot be written before any work.

    Raises
    ------
    SpecError: matplotlib is missing, or the folder of a file.
    """
    for name in ("plot", "trace"):
        if options[name] is None:
            continue
        path = Path(options[name])
        try:
            fault = "is a folder; name a file" if path.is_dir() else ""
            fault = fault or ("" if path.parent.is_dir() else f"the folder {path.parent} does not exist")
        except (OSError, ValueError) as error:
            fault = f"cannot be written: {error}"
        if fault:
            raise SpecError(fault, f"--{name} {path}")
    if options["plot"] is not None:
        from parsolve.render.picture import pyplot

        pyplot()


def write_extras(result: Result, options: Mapping[str, Any], output: Output) -> None:
    """Write the files that were asked for.

    Raises
    ------
    SpecError: a file cannot be written.
    """
    if not result.plans:
        output.notes("hint", (f"no plan: --{name} writes nothing" for name in ("plot", "trace") if options[name]))
        return
    if options["plot"] is not None:
        from parsolve.render.picture import memory_picture

        memory_picture(result.plans[0], Path(options["plot"]))
    if options["trace"] is not None:
        from parsolve.commands.output import write_file
        from parsolve.render.trace import chrome_trace

        write_file(Path(options["trace"]), chrome_trace(result.plans[0]), "--trace")
