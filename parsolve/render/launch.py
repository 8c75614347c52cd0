"""A launch as shell text that pastes and runs."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from parsolve.render.text import clean

if TYPE_CHECKING:
    from parsolve.launchers import Launch


def script(launch: Launch, about: str) -> str:
    """Comment lines, the files as here-documents, and the command."""
    lines = [f"# {clean(about)}", *(f"# {clean(note)}" for note in launch.notes)]
    for name, text in launch.files.items():
        unless = f"[ -e {shlex.quote(name)} ] || " if name in launch.completed else ""
        start = f"{unless}cat > {shlex.quote(name)} <<'{_delimiter(text)}'"
        lines += [start, text.rstrip("\n"), _delimiter(text)]
    return "\n".join([*lines, launch.script()]) + "\n"


def slurm_script(launch: Launch, about: str, hosts: int, processes: int) -> str:
    """An sbatch script: files once on the first node, then the command once on every node.

    Each node runs the same line, which finds its peers by MASTER_ADDR; the command is handed to ``srun bash`` as text.
    """
    head = [
        "#!/bin/bash",
        f"#SBATCH --nodes={hosts}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={processes}",
        "#SBATCH --exclusive",
        "#SBATCH --job-name=parsolve",
        "set -euo pipefail",
    ]
    made = script(launch, about).rstrip("\n")
    command = launch.script()
    before = made[: len(made) - len(command)].rstrip("\n")
    address = 'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)" MASTER_PORT=29500'
    word = _delimiter(command)
    run = [f"srun bash -c \"$(cat <<'{word}'", 'export MACHINE_RANK="$SLURM_NODEID"', command, word, ')"']
    return "\n".join([*head, before, address, *run]) + "\n"


def _delimiter(text: str) -> str:
    """A here-document's last line that its text does not hold."""
    word = "END_OF_FILE"
    while word in text.splitlines():
        word += "_"
    return word
