"""A Megatron-LM command as text (one line, a script, a bash array of arguments) taken apart into options."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from parsolve.errors import SpecError
from parsolve.shell_words import shell_words

MAX_CHARACTERS = 2**20


@dataclass
class Command:
    """Environment, the launcher's options, the program and its options, each with its values as written."""

    env: dict[str, str] = field(default_factory=dict)
    launcher: dict[str, list[str]] = field(default_factory=dict)
    options: dict[str, list[str]] = field(default_factory=dict)
    loose: list[str] = field(default_factory=list)
    script: str = ""

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
    if source_is_table(text, where):
        return _from_table(text, where)
    try:
        words, notes = shell_words(text)
    except ValueError as error:
        raise SpecError(f"cannot be split into words: {error}", where) from None
    command = _sorted(words, where)
    command.loose[:0] = notes
    return command


def source_is_table(text: str, where: str) -> bool:
    """The file is YAML: options as keys, as in Megatron-LM's own test recipes and ``--yaml-cfg``."""
    return Path(where).suffix.lower() in (".yaml", ".yml")


def _from_table(text: str, where: str) -> Command:
    """Options from a table of keys, nested or not: ``--num-layers: 32``, ``num_layers: 32``, true for a switch.

    Keys in capitals are a test recipe's own (``TEST_TYPE``, ``METRICS``).
    """
    from parsolve.files import read_file

    command = Command()

    def add(table: dict[str, object]) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                if key == "ENV_VARS":
                    command.env.update({str(name): str(content) for name, content in value.items()})
                else:
                    add(value)
            elif value is not None and value is not False and not str(key).isupper():
                name = "--" + str(key).lstrip("-").replace("_", "-")
                values = value if isinstance(value, list) else [] if value is True else [value]
                command.options[name] = [word for item in values for word in str(item).split()]

    add(read_file(where))
    if not command.options:
        raise SpecError("has no options such as --num-layers", where)
    return command


LAUNCHERS = frozenset(
    {
        *("torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed", "accelerate", "ray"),
        *("srun", "sbatch", "mpirun", "mpiexec", "docker", "singularity", "apptainer", "enroot", "nsys", "numactl"),
    }
)
OF_LAUNCHERS = frozenset(
    {
        *("--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port", "--standalone"),
        *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--max-restarts", "--local-addr"),
        *("--monitor-interval", "--redirects", "--num-nodes", "--num-gpus", "--hostfile"),
    }
)
"""Options of torchrun and deepspeed that Megatron-LM does not have: theirs even in an array before the launcher's name.
Both take underscores too."""
ENDS = re.compile(r"[|&;]+|\d?>{1,2}.*|&>.*|<.*|2>&1")
QUIET = frozenset(
    {")", "(", "export", "exec", "python", "python3", "-m", "-u", "cd", "source", "$", "then", "fi", "do", "done"}
)


def _sorted(words: list[str], where: str) -> Command:
    command = Command()
    again: list[tuple[dict[str, list[str]], str, list[str]]] = []
    current: list[str] | None = None
    in_launcher = False
    for word in words:
        ended = word.endswith(";") and not ENDS.fullmatch(word)
        word = word.rstrip(";") if ended else word
        if word.rpartition("/")[2] in LAUNCHERS:
            in_launcher, current = True, None
        elif re.fullmatch(r"[\w./${}-]+\.py", word) and (current is None or in_launcher):
            in_launcher, current, command.script = False, None, word.rpartition("/")[2]
        elif ENDS.fullmatch(word):
            current = None
        elif word.startswith("--"):
            name, equals, value = word.rstrip(")").partition("=")
            theirs = in_launcher or name.replace("_", "-") in OF_LAUNCHERS
            table = command.launcher if theirs else command.options
            name = name.replace("_", "-") if theirs else name
            current = [value] if equals else []
            if name in table:
                again.append((table, name, table[name]))
            table[name] = current
        elif re.fullmatch(r"[A-Za-z_]\w*=.*", word, re.DOTALL) and current is None:
            name, _, value = word.partition("=")
            if value not in ("(", ""):
                command.env[name] = value.strip("()")
        elif word in QUIET or current is None:
            current = None
        else:
            current.append(word.rstrip(")") if word.endswith(")") and "(" not in word else word)
        current = None if ended else current
    odd = dict.fromkeys(name for table, name, before in again if table[name] != before)
    command.loose += [f"{name} is given twice, the last counts" for name in odd]
    if not command.options:
        raise SpecError("has no options such as --num-layers", where)
    return command
