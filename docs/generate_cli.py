"""Writes docs/cli.md, the command reference, from --help: ``python docs/generate_cli.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from parsolve.cli import main

PAGE = Path(__file__).with_name("cli.md")
WIDTH = 88
INTRO = """# Command reference

Written by `python docs/generate_cli.py` from the commands' own `--help`; do not edit by hand.

Exit codes of all commands: 0 plans printed or check passed, 1 the answer is no (infeasible, or `check` found
violations), 2 usage or a bad spec, 3 time limit before any plan, 130 interrupted (the best so far is still printed),
101 a bug. Only the requested format goes to stdout; assumptions, warnings and progress go to stderr. `NO_COLOR` is
respected; `PARSOLVE_DEBUG=1` shows the traceback of an error.
"""


def reference() -> str:
    """The whole page."""
    widths: dict[str, Any] = {"terminal_width": WIDTH, "max_content_width": WIDTH}
    group = click.Context(main, info_name="parsolve", **{**main.context_settings, **widths})
    blocks = [INTRO, f"## parsolve\n\n{_help(main, group)}"]
    for name in main.list_commands(group):
        command = main.get_command(group, name)
        assert command is not None
        context = click.Context(command, parent=group, info_name=name, **widths)
        blocks.append(f"## parsolve {name}\n\n{_help(command, context)}")
    return "\n".join(blocks)


def _help(command: click.Command, context: click.Context) -> str:
    lines = command.get_help(context).splitlines()
    return "```text\n" + "\n".join(line.rstrip() for line in lines) + "\n```\n"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
