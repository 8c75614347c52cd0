"""What all launchers share: the registry, quoting, plans made for another framework."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from launch_problems import config, model, problem

from parsolve.errors import NotExpressibleError, UnknownNameError
from parsolve.launchers import LAUNCHERS, launch
from parsolve.render.launch import script, slurm_script


def test_registry() -> None:
    assert set(LAUNCHERS) == {"megatron", "deepspeed", "torchtitan", "accelerate", "nemo"}
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
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_names_stay_inert(name: str, launcher: str, tmp_path: Path) -> None:
    p = problem(model(name=name), framework=launcher)
    result = launch(launcher, p, config(p, zero=2))
    for text in (result.line(), result.script()):
        program = (
            'torchrun() { printf "%s\\0" "$@"; }; deepspeed() { torchrun "$@"; }; accelerate() { torchrun "$@"; }\n'
            + text
        )
        shell = ["bash", "-euc", program]
        words = subprocess.run(shell, cwd=tmp_path, env={}, capture_output=True, check=True, text=True).stdout
        expected = result.command({})[0][1:]
        assert words.split("\0")[:-1] == expected
        assert list(tmp_path.iterdir()) == []
    assert "\n" not in result.line()


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_scripts_with_files_stay_inert(name: str, launcher: str, tmp_path: Path) -> None:
    """The whole of ``-f LAUNCHER``: comments, here-documents, command."""
    p = problem(model(name=name), framework=launcher)
    text = script(launch(launcher, p, config(p, zero=2)), f"plan for {name}")
    program = "torchrun() { :; }; deepspeed() { :; }; accelerate() { :; }\n" + text
    subprocess.run(["bash", "-euc", program], cwd=tmp_path, capture_output=True, check=True)
    assert {path.name for path in tmp_path.iterdir()} == set(launch(launcher, p, config(p, zero=2)).files)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("launcher", ["megatron", "torchtitan", "accelerate", "nemo"])
def test_slurm_scripts_start_the_same_command(name: str, launcher: str, tmp_path: Path) -> None:
    p = problem(model(name=name), framework=launcher)
    made = launch(launcher, p, config(p, zero=2))
    text = slurm_script(made, f"plan for {name}", 2, 8)
    assert text.startswith("#!/bin/bash\n#SBATCH --nodes=2\n")
    stand_in = 'torchrun() { printf "%s\\0" "$@"; }; accelerate() { torchrun "$@"; }; export -f torchrun accelerate\n'
    slurm = 'scontrol() { echo host0; }; srun() { "$@"; }; export SLURM_JOB_NODELIST=x SLURM_NODEID=0\n'
    shell = ["bash", "-euc", stand_in + slurm + text]
    words = subprocess.run(shell, cwd=tmp_path, capture_output=True, check=True, text=True).stdout
    assert words.split("\0")[:-1] == made.command({})[0][1:]
    assert {path.name for path in tmp_path.iterdir()} == set(made.files)


def test_command_for_subprocess() -> None:
    p = problem()
    argv, env = launch("megatron", p, config(p, tp=2)).command({"MASTER_ADDR": "node7"})
    assert argv[argv.index("--rdzv-endpoint") + 1] == "node7:29500"
    assert env == {"MASTER_ADDR": "node7", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_steps_follow_the_token_budget(launcher: str) -> None:
    p = problem(framework=launcher, train_tokens=10**9)
    assert "3815" in " ".join(launch(launcher, p, config(p, zero=2)).argv)  # ceil(1e9 / (64 * 4096))
