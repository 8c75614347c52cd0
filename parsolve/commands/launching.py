"""Writes a plan's launch: to stdout, to a file, or as a folder of files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from parsolve.commands.output import Output, write_file
from parsolve.errors import SpecError
from parsolve.render.launch import script, slurm_script

if TYPE_CHECKING:
    from parsolve.launchers import Launch

SCRIPT = "launch.sh"
SLURM_SCRIPT = "launch.sbatch"


def write_launch(launch: Launch, about: str, output: Output, place: tuple[int, int] | None = None) -> None:
    """To stdout as one script, to a file, or, with files of its own, into the folder that -o names.

    ``place``: write a Slurm batch script for so many hosts with so many processes each.

    Raises
    ------
    SpecError: a place that cannot be written.
    """
    folder = output.path
    if folder is None or (len(launch.files) < 2 and not folder.is_dir()):
        output.emit(script(launch, about) if place is None else slurm_script(launch, about, *place))
        return
    _make(folder)
    bare = replace(launch, files={})
    text = script(bare, about) if place is None else slurm_script(bare, about, *place)
    main = SCRIPT if place is None else SLURM_SCRIPT
    for name, content in {**launch.files, main: text}.items():
        if Path(name).name != name:
            raise SpecError(f"the launcher's file name {name!r} leaves the folder", f"-o {folder}")
        write_file(folder / name, content.rstrip("\n") + "\n")
    output.note("written", f"{', '.join([main, *launch.files])} in {folder}")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise SpecError(f"cannot be made a folder: {error.strerror}", f"-o {folder}") from None
