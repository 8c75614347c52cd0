"""Where a command's output goes: the requested format to stdout or a file, everything else to stderr."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from parsolve.commands.options import output_path
from parsolve.errors import SpecError
from parsolve.render.text import clean

TEXTS = ("table", "json", "csv")
"""Formats that are no launcher's."""


def _check_format(name: str, as_json: bool, slurm: bool) -> None:
    if as_json and name not in ("table", "json"):
        raise click.UsageError(f"give only one of --json and -f {name}")
    if slurm and (as_json or name in TEXTS):
        raise click.UsageError("--slurm goes with a launcher's format: add -f megatron, say")
    if slurm and name == "deepspeed":
        raise SpecError(
            "DeepSpeed's launcher reaches the hosts by ssh from one of them: run its command there", "--slurm"
        )


@dataclass(frozen=True)
class Output:
    """The output options of one run."""

    format: str
    path: Path | None
    quiet: bool = False
    verbose: bool = False

    @staticmethod
    def of(options: Mapping[str, Any]) -> Output:
        """From click's options; those that contradict each other or cannot be written to are refused at once."""
        _check_format(options["format_"], options["as_json"], options.get("slurm", False))
        output = Output(
            "json" if options["as_json"] else options["format_"],
            output_path(options["output"]),
            options["quiet"],
            options["verbose"],
        )
        output._check_writable()
        return output

    def _check_writable(self) -> None:
        if self.path is None:
            return
        try:
            folder = self.path if self.path.is_dir() else self.path.parent
            if self.path.is_dir() and self.format in TEXTS:
                raise SpecError("is a folder; name a file", f"-o {self.path}")
            if not folder.is_dir():
                raise SpecError(f"the folder {folder} does not exist", f"-o {self.path}")
            target = self.path if self.path.exists() else folder
        except (OSError, ValueError) as error:
            raise SpecError(f"cannot be written: {_reason(error)}", f"-o {self.path}") from None
        if not os.access(target, os.W_OK):
            raise SpecError("cannot be written: permission denied", f"-o {self.path}")

    @property
    def color(self) -> bool:
        """Colour only on a terminal, and not where NO_COLOR is set."""
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        return self.path is None and not plain and sys.stdout.isatty()

    @property
    def unicode(self) -> bool:
        """Whether rules may be drawn with more than ASCII."""
        encoding = "utf-8" if self.path else (getattr(sys.stdout, "encoding", None) or "ascii")
        return encoding.lower().replace("-", "").startswith("utf")

    @property
    def width(self) -> int:
        """Columns of the terminal, 80 where there is none."""
        return max(40, shutil.get_terminal_size((80, 24)).columns)

    def note(self, kind: str, text: str) -> None:
        """A line on stderr: ``assumption: …``."""
        if not self.quiet:
            to_stderr(f"{kind}: {text}")

    def notes(self, kind: str, texts: Iterable[str]) -> None:
        """Several lines on stderr."""
        for text in texts:
            self.note(kind, text)

    def emit(self, text: str) -> None:
        """The requested format, ending in one line break."""
        text = text if text.endswith("\n") or not text else text + "\n"
        if self.path is not None:
            write_file(self.path, text)
            return
        if sys.stdout is None:
            raise SpecError("is closed", "stdout")
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            _drop_stdout()  # the reader has enough; the exit code stays the answer's
        except OSError as error:
            _drop_stdout()
            raise SpecError(f"cannot be written: {_reason(error)}", "stdout") from None


def _drop_stdout() -> None:
    """What is still buffered goes nowhere, so that leaving does not fail on it again."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def write_file(path: Path, text: str, option: str = "-o") -> None:
    """Write text as UTF-8.

    Raises
    ------
    SpecError: with the system's reason.
    """
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot be written: {_reason(error)}", f"{option} {path}") from None


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def to_stderr(text: str) -> None:
    """One cleaned line; a closed stderr is not an error."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(clean(text) + "\n")
            sys.stderr.flush()


class Progress:
    """Lines of progress on stderr: none in the first second, then one a second at most."""

    def __init__(self, quiet: bool, every_s: float = 1.0) -> None:
        self.quiet, self.every_s, self.next = quiet, every_s, time.monotonic() + every_s

    def __call__(self, text: str) -> None:
        """Say it when it is time."""
        now = time.monotonic()
        if not self.quiet and now >= self.next:
            self.next = now + self.every_s
            to_stderr(f"progress: {text}")
