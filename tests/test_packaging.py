"""The wheel holds one top-level name with the data, and the layers import leftwards only."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out, tree = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("tree") / "parsolve"
    pytest.importorskip("setuptools")
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "*.egg-info", ".*_cache", ".hypothesis", "__pycache__")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(tree)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


def test_the_wheel_installs_one_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"parsolve"}
    for needed in (
        "parsolve/optimizer/model.py",
        "parsolve/constraints/memory.py",
        "parsolve/objectives/step_time.py",
        "parsolve/py.typed",
        "parsolve/data/gpus/h100-sxm.toml",
        "parsolve/data/models/llama2-70b.toml",
        "parsolve/data/profiles/default.toml",
    ):
        assert needed in names
    packaged = {name for name in names if name.endswith(".py")}
    sources = {
        f"parsolve/{path.relative_to(ROOT / 'parsolve')}"
        for path in (ROOT / "parsolve").rglob("*.py")
        if "build" not in path.parts
    }
    assert sources <= packaged


def test_the_wheel_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import parsolve; p = parsolve.Problem('a100-sxm-80gb:1x8', 'llama2-7b', seq_len=4096, gbs=64);"
        "print(parsolve.__file__, parsolve.solve(p, top=1).status)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout and "optimal" in done.stdout


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_only_the_optimizer_imports_ortools() -> None:
    for path in [
        *(ROOT / "parsolve").glob("*.py"),
        *(ROOT / "constraints").glob("*.py"),
        *(ROOT / "objectives").glob("*.py"),
    ]:
        assert not any(name.split(".")[0] == "ortools" for name in imports_of(path)), path


def test_formulas_do_not_know_the_search_or_the_front_door() -> None:
    right_of_it = ("parsolve.optimizer", "parsolve.launchers", "parsolve.render", "parsolve.commands", "parsolve.cli")
    for folder in ("constraints", "objectives"):
        for path in (ROOT / folder).glob("*.py"):
            assert not [name for name in imports_of(path) if name.startswith(right_of_it)], path
