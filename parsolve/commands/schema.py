"""``parsolve schema``."""

from __future__ import annotations

from typing import Any

import click

from parsolve.commands.options import output_path

SPECS = ("cluster", "model", "result")


@click.command("schema", short_help="JSON Schema of cluster files, model files and results.")
@click.argument("what", type=click.Choice(SPECS), required=False)
@click.option("-o", "--output", metavar="FILE", help="Write here instead of to stdout.")
def command(what: str | None, output: str | None) -> int:
    """The JSON Schema of cluster files, model files or results; without a name, of all three by name.

    \b
    Example:
      parsolve schema cluster > cluster.schema.json
    """
    from parsolve.commands.output import Output
    from parsolve.render.data import to_json
    from parsolve.schema import schema

    target = Output("json", output_path(output))
    data: dict[str, Any] = schema(what) if what else {name: schema(name) for name in SPECS}
    target.emit(to_json(data))
    return 0
