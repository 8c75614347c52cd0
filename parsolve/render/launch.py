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
        lines += [f"cat > {shlex.quote(name)} <<'{_delimiter(text)}'", text.rstrip("\n"), _delimiter(text)]
    return "\n".join([*lines, launch.script()]) + "\n"


def _delimiter(text: str) -> str:
    """A here-document's last line that its text does not hold."""
    word = "END_OF_FILE"
    while word in text.splitlines():
        word += "_"
    return word
