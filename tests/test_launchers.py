"""What all launchers share: the registry, quoting, plans made for another framework."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from launch_problems import config, model, problem

from parsolve.cli import main
from parsolve.errors import NotExpressibleError, UnknownNameError
from parsolve.launchers import LAUNCHERS, launch
from parsolve.launchers.base import ShellWord
from parsolve.render.launch import script, slurm_script
from parsolve.saved import saved_plan


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
    "$HOME ${PATH}",
    "a&touch pwned|b>pwned<c",
    "{a,b} ~ !! #x",
    "END_OF_FILE\ntouch pwned",
    "a\rb\tc",
    "\x1b[31mred",
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


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_every_text_is_shell(launcher: str) -> None:
    """``bash -n`` reads every text whole, and Python's shell splitter finds the same words in the line."""
    for name in HOSTILE:
        p = problem(model(name=name), framework=launcher)
        made = launch(launcher, p, config(p, zero=2))
        for text in (made.line(), made.script(), script(made, name), slurm_script(made, name, 2, 8)):
            done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, "")
        words = shlex.split(made.line())[len(made.env) :]
        plain = [word.strip('"') if isinstance(word, ShellWord) else word for word in made.argv]
        assert words == plain


@pytest.mark.parametrize("name", [name for name in HOSTILE if name and "\x1b" not in name])
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_hostile_file_names_from_end_to_end(name: str, tmp_path: Path) -> None:
    """A model file of that name: what is printed starts the launcher with the name and does nothing else."""
    shape = {"num_layers": 8, "hidden_size": 512, "ffn_size": 2048, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64}
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps({**shape, "vocab_size": 32000, "name": name}))
    place = tmp_path / "run"
    place.mkdir()
    for launcher in ("deepspeed", "accelerate"):
        words = ["check", "h100-sxm:1x8", str(file), "--seq-len", "2048", "--gbs", "64", "--config", "zero=2"]
        done = CliRunner().invoke(main, [*words, "--framework", launcher, "-f", launcher, "-q"])
        assert done.exit_code == 0, done.output
        program = 'deepspeed() { printf "%s\\0" "$@"; }; accelerate() { deepspeed "$@"; }\n' + done.stdout
        seen = subprocess.run(["bash", "-euc", program], cwd=place, capture_output=True, check=True, text=True).stdout
        found = seen.split("\0")
        expected = " ".join(name.split())
        assert found[found.index("--config_name") + 1] == (f"./{expected}" if expected.startswith("-") else expected)
        assert {path.name for path in place.iterdir()} <= {"ds_config.json", "accelerate.yaml", "hostfile"}
        table = CliRunner().invoke(main, [*words, "--framework", launcher, "-q"]).stdout
        assert "\x1b" not in table and "\r" not in table


STAND_IN = """#!/bin/sh
for word in "$@"; do printf '%s\\0' "$word"; done >> "$SEEN"
"""
HOSTILE_FILES = [name for name in HOSTILE if name and "\x1b" not in name] + ["\u202eтест \u2028 é", "-rf", "%s%n", "'"]


def _stand_ins(folder: Path, *names: str) -> dict[str, str]:
    """An environment in which the launchers only write down what they are given."""
    folder.mkdir()
    for name in names:
        (folder / name).write_text(STAND_IN)
        (folder / name).chmod(0o755)
    (folder / "scontrol").write_text("#!/bin/sh\necho host0\n")
    (folder / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    for name in ("scontrol", "srun"):
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "x", "SLURM_NODEID": "0"}
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SEEN": str(folder / "seen"), **slurm}


@pytest.mark.parametrize("name", HOSTILE_FILES)
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_every_way_out_starts_the_same_command(name: str, launcher: str, tmp_path: Path) -> None:
    """Printed, as a file, as a folder, for Slurm, out of JSON, rendered again: the launcher gets what is meant."""
    shape = {"num_layers": 8, "hidden_size": 512, "ffn_size": 2048, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64}
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps({**shape, "vocab_size": 32000, "name": name}))
    env = _stand_ins(tmp_path / "bin", "torchrun", "deepspeed", "accelerate")
    place, seen = tmp_path / "run", tmp_path / "bin" / "seen"

    def told(*words: str, folder: bool = False) -> str:
        done = CliRunner().invoke(main, [*words, "-q", *(["-o", str(place)] if folder else [])])
        assert done.exit_code == 0, done.output
        return (place / "launch.sh").read_text() if folder else done.stdout

    def run(text: str, files: set[str]) -> list[str]:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        subprocess.run(["bash", "-euc", text], cwd=place, env=env, capture_output=True, check=True)
        assert {path.name for path in place.iterdir()} == files
        words = seen.read_text().split("\0")[:-1]
        seen.unlink()
        return words

    common = ["--seq-len", "2048", "--gbs", "64", "--config", "zero=2", "--framework", launcher]
    check = ["check", "h100-sxm:1x8", str(file), *common]
    saved = tmp_path / "result"
    saved.write_text(told(*check, "--json"))
    data = json.loads(saved.read_text())
    expected = launch(launcher, *saved_plan(data, 0, "saved"))
    argv, files = expected.command({})[0][1:], set(expected.files)
    assert run(told(*check, "-f", launcher), files) == argv
    assert run(told("render", str(saved), "-f", launcher), files) == argv
    if launcher != "deepspeed":
        assert run(told(*check, "-f", launcher, "--slurm"), files) == argv
    args = data["plans"][0]["args"][launcher]
    assert run(args if isinstance(args, str) else args["command"], set()) == argv
    place.mkdir(exist_ok=True)
    assert run(told(*check, "-f", launcher, folder=True), set()) == argv


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
