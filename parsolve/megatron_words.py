"""A Megatron-LM command as text (one line, a script, a bash array of arguments) taken apart into options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from parsolve.errors import SpecError

MAX_CHARACTERS = 2**20


@dataclass
class Command:
    """Environment, torchrun's options and the program's options, each with its values as written."""

    env: dict[str, str] = field(default_factory=dict)
    launcher: dict[str, list[str]] = field(default_factory=dict)
    options: dict[str, list[str]] = field(default_factory=dict)
    loose: list[str] = field(default_factory=list)

    def has(self, option: str) -> bool:
        """The option is on the line."""
        return option in self.options

    def text(self, option: str, default: str | None = None) -> str | None:
        """The value of an option that takes one.

        Raises
        ------
        SpecError: the option has none, or a shell variable whose value is not on the line.
        """
        if option not in self.options:
            return default
        values = self.options[option]
        if len(values) != 1:
            raise SpecError(f"takes one value, got {len(values)}", option)
        if "$" in values[0]:
            raise SpecError(f"is the shell variable {values[0]}: write its value", option)
        return values[0]

    def number(self, option: str, default: int) -> int:
        """A whole-number option, or its default."""
        text = self.text(option)
        if text is None:
            return default
        if not re.fullmatch(r"\d{1,15}", text):
            raise SpecError(f"{text!r} is not a whole number", option)
        return int(text)


def read_source(source: str) -> tuple[str, str]:
    """The text of a command given as itself or as a file, and what to call it in messages."""
    if len(source) < 4096 and "\n" not in source and " " not in source.strip():
        path = Path(source)
        try:
            if path.is_file():
                return path.read_text(encoding="utf-8")[: MAX_CHARACTERS + 1], source
        except (OSError, ValueError) as error:
            raise SpecError(f"cannot be read: {getattr(error, 'strerror', None) or error}", source) from None
        if not source.startswith("-"):
            raise SpecError("no such file; give a file or the whole line in quotes", "--from-megatron")
    return source, "--from-megatron"


def parse_command(source: str) -> Command:
    """Every word of the command under the option that it belongs to.

    Raises
    ------
    SpecError: quotes that do not close, or an option that is given twice with different values.
    """
    text, where = read_source(source)
    if len(text) > MAX_CHARACTERS:
        raise SpecError("is too long for a command", where)
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", text), comments=True)
    except ValueError as error:
        raise SpecError(f"cannot be split into words: {error}", where) from None
    variables = {name: value for name, value in _assignments(words) if "$" not in value}
    return _sorted(words, variables, where)


def _assignments(words: Iterable[str]) -> Iterable[tuple[str, str]]:
    for word in words:
        found = re.fullmatch(r"([A-Za-z_]\w*)=([^(].*|)", word, re.DOTALL)
        if found:
            yield found[1], found[2]


def _sorted(words: list[str], variables: dict[str, str], where: str) -> Command:
    command = Command()
    current: list[str] | None = None
    in_launcher = False
    for raw in words:
        word = re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], found[0]), raw)
        if word in ("torchrun", "torch.distributed.run", "torch.distributed.launch"):
            in_launcher, current = True, None
        elif re.fullmatch(r"[\w./$\{\}-]+\.py", word):
            in_launcher, current = False, None
        elif word.startswith("--"):
            name, equals, value = word.rstrip(")").partition("=")
            table = command.launcher if in_launcher else command.options
            name = name.replace("_", "-") if in_launcher else name
            current = [value] if equals else []
            if name in table and table[name] != current:
                command.loose.append(f"{name} is given twice, the last counts")
            table[name] = current
        elif re.fullmatch(r"[A-Za-z_]\w*=.*", word, re.DOTALL) and current is None:
            name, _, value = word.partition("=")
            if value not in ("(", ""):
                command.env[name] = value.strip("()")
        elif word in (")", "(", "&&", ";", "export", "exec", "srun", "python", "python3", "-m") or current is None:
            current = None
        else:
            current.append(word.rstrip(")") if word.endswith(")") and "(" not in word else word)
    if not command.options:
        raise SpecError("has no options such as --num-layers", where)
    return command
