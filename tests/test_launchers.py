"""What all launchers share: the registry, quoting, plans made for another framework."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from launch_problems import config, model, problem

from parsolve.errors import NotExpressibleError, UnknownNameError
from parsolve.launchers import LAUNCHERS, launch
from parsolve.launchers.base import ShellWord


def test_registry() -> None:
    assert set(LAUNCHERS) == {"megatron", "deepspeed"}
    with pytest.raises(UnknownNameError, match="did you mean megatron"):
        launch("megatorn", problem(), config(problem()))


def test_script_is_the_line_over_several_lines() -> None:
    result = launch("megatron", problem(), config(problem(), tp=2))
    script = result.script()
    assert len(script.splitlines()) > 20
    assert shlex.split(script.replace("\\\n", " ")) == shlex.split(result.line())


def test_plan_of_another_framework() -> None:
    p = problem(framework="deepspeed")
    assert "--sequence-parallel" not in launch("megatron", p, config(p, tp=2, sequence_parallel=False)).argv
    with pytest.raises(NotExpressibleError, match="pp=2"):
        launch("megatron", p, config(p, pp=2, zero=3))


HOSTILE = [
    "a b",
    'it\'s "x"',
    "$(touch pwned)",
    "`touch pwned`",
    "a;touch pwned",
    "a\ntouch pwned",
    "--flag",
    "*",
    "",
    "\\",
]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("launcher", ["megatron", "deepspeed"])
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_names_stay_inert(name: str, launcher: str, tmp_path: Path) -> None:
    p = problem(model(name=name), framework=launcher)
    result = launch(launcher, p, config(p))
    for text in (result.line(), result.script()):
        program = 'torchrun() { printf "%s\\0" "$@"; }; deepspeed() { torchrun "$@"; }\n' + text
        shell = ["bash", "-euc", program]
        words = subprocess.run(shell, cwd=tmp_path, env={}, capture_output=True, check=True, text=True).stdout
        expected = [_expanded(word) for word in result.argv[1:]]
        assert words.split("\0")[:-1] == expected
        assert list(tmp_path.iterdir()) == []
    assert "\n" not in result.line()


def _expanded(word: str) -> str:
    """What the shell makes of a word where no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word.strip('"')) if isinstance(word, ShellWord) else word
