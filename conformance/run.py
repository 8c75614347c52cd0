"""Prints what the real parsers of every launcher say to random plans: ``python run.py DIR [COUNT] [NAME…]``.

DIR is what ``conformance/setup.sh`` made. Exits with 1 when a line is refused or read otherwise than meant.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
ABSENT = (
    "transformer_engine,megatron.energon,nvidia_resiliency_ext,modelopt,peft,diffusers,qwen_vl_utils,timm,open_clip,mlflow,"
    "comet_ml,wandb,mistral_common,fla,flashinfer,nemo_run,causal_conv1d,mamba_ssm"
)
"""Packages of Megatron-Bridge that a plan does not touch."""
JOBS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "megatron-0.17": ("megatron", "0.17", "check_megatron.py", {"MEGATRON": "megatron-0.17.1"}),
    "megatron-0.18": ("megatron", "0.18", "check_megatron.py", {"MEGATRON": "megatron-0.18.2"}),
    "megatron-0.19": ("megatron", "0.19", "check_megatron.py", {"MEGATRON": "megatron-0.19.2"}),
    "parameters": ("megatron", "0.19", "check_parameters.py", {"MEGATRON": "megatron-0.19.2"}),
    "deepspeed": ("deepspeed", "-", "check_deepspeed.py", {}),
    "torchtitan": ("torchtitan", "-", "check_torchtitan.py", {"TORCHTITAN": "torchtitan-0.3.0"}),
    "accelerate": ("accelerate", "-", "check_accelerate.py", {}),
    "nemo": (
        "nemo",
        "-",
        "check_nemo.py",
        {"MEGATRON": "megatron-0.19.2", "BRIDGE": "bridge-0.6.2", "PRETEND": ABSENT},
    ),
}
"""Name: launcher, version, the checker, and where in DIR its packages are."""
PER_PARAMETERS = 5
"""Building models takes longer: one plan in so many is built."""


def run(name: str, folder: Path, count: int) -> bool:
    """One launcher: its plans, its checker, a line of figures and the distinct faults."""
    launcher, version, checker, places = JOBS[name]
    count = max(1, count // PER_PARAMETERS) if name == "parameters" else count
    command = [sys.executable, str(HERE / "plans.py"), launcher, version, str(count)]
    plans = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    env = {**os.environ, **{key: value if key == "PRETEND" else str(folder / value) for key, value in places.items()}}
    python = str(folder / "venv" / "bin" / "python")
    checked = subprocess.run([python, checker], cwd=HERE, env=env, input=plans, capture_output=True, text=True)
    results = [json.loads(line) for line in checked.stdout.splitlines() if line.startswith('{"id"')]
    gaps = sum('"gap"' in line for line in plans.splitlines())
    good = sum(result["ok"] for result in results)
    wanted = len(plans.splitlines()) - gaps
    print(f"{name:<14} {good:>4} of {wanted} accepted and equal; {gaps} legal plans without words", flush=True)
    for fault, times in Counter(result["error"] for result in results if not result["ok"]).most_common(10):
        print(f"    {times} x {fault}")
    if len(results) < wanted:
        print(f"    the checker stopped: {checked.stderr[-300:]}")
    return good == wanted


def main() -> int:
    """All launchers, or those that are named."""
    folder, count = Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 500
    names = sys.argv[3:] or list(JOBS)
    unknown = sorted(set(names) - set(JOBS))
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(JOBS)}")
    return 0 if not [name for name in names if not run(name, folder, count)] else 1


if __name__ == "__main__":
    sys.exit(main())
