"""The command line: the group of commands, and how every way of ending becomes an exit code.

0 done, 1 the answer is no, 2 usage or a bad spec, 3 time limit before any plan, 130 interrupted, 101 a bug.
Commands load when they are called; each lives in its own file in ``parsolve.commands``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from parsolve import __version__
from parsolve.errors import ParsolveError, UnknownNameError

# the specs use no pydantic plugins; looking for some reads the metadata of every installed package
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

COMMANDS = {
    "solve": "parsolve.commands.solve",
    "check": "parsolve.commands.check",
    "render": "parsolve.commands.render",
    "validate": "parsolve.commands.validate",
    "calibrate": "parsolve.commands.calibrate",
    "gpus": "parsolve.commands.gpus",
    "models": "parsolve.commands.models",
    "clusters": "parsolve.commands.clusters",
    "explain": "parsolve.commands.explain",
    "schema": "parsolve.commands.schema",
}
INTERRUPTED, BUG = 130, 101


class Cli(click.Group):
    """A group whose commands are imported on demand and whose errors are one line with an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which people meet them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click, with near misses in the message."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            raise click.UsageError(str(UnknownNameError("command", args[0], COMMANDS)), ctx)
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        """Run and exit with the contract's code."""
        sys.exit(self._run(args, prog_name, {**extra, "standalone_mode": False}))

    def _run(self, args: Sequence[str] | None, prog_name: str | None, extra: dict[str, Any]) -> int:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError):
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        try:
            code = super().main(args, prog_name, **extra)
            return code if isinstance(code, int) else 0
        except click.ClickException as error:
            error.show()
            return 2
        except (click.Abort, KeyboardInterrupt):
            return _say("interrupted", INTERRUPTED)
        except BrokenPipeError:
            return 0
        except Exception as error:
            if os.environ.get("PARSOLVE_DEBUG") == "1":
                raise
            if isinstance(error, ParsolveError):
                return _say(f"error: {error}", error.exit_code)
            if "KeyboardInterrupt" in str(error):  # pydantic wraps an interrupt during its own start
                return _say("interrupted", INTERRUPTED)
            text = f"error: a bug in parsolve: {type(error).__name__}: {error}"
            return _say(f"{text}\nplease report it; PARSOLVE_DEBUG=1 shows where", BUG)


def _say(text: str, code: int) -> int:
    from parsolve.commands.output import to_stderr

    for line in text.split("\n"):
        to_stderr(line)
    return code


@click.group(cls=Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 96})
@click.version_option(__version__, prog_name="parsolve")
def main() -> None:
    """Provably optimal parallel training configurations for a cluster and a model.

    \b
    Example:
      parsolve solve h100-sxm:16x8 llama2-70b --seq-len 4096 --gbs 1024
    """


__all__ = ["main"]
