#!/usr/bin/env bash
# Makes DIR/venv and one folder for each version of each launcher from PyPI packages; CPU only, about 2 GB.
# usage: bash conformance/setup.sh DIR
set -euo pipefail
dir=${1:?usage: bash conformance/setup.sh DIR}
mkdir -p "$dir"; dir=$(cd "$dir" && pwd)
[ -x "$dir/venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$dir/venv"
pip="$dir/venv/bin/python -m pip install -q --disable-pip-version-check"
$pip "${TORCH:-torch==2.13.0}" numpy  # TORCH may name a CPU build, which is far smaller
$pip 'setuptools<80' six pybind11 typing_extensions einops regex sentencepiece omegaconf pyyaml packaging 'transformers==5.24.0'
$pip hjson triton 'deepspeed==0.19.8' 'accelerate==1.15.0'
$pip tensorboard tyro tomli 'datasets>=3.6,<4.8' tokenizers torchdata safetensors 'spmd_types==0.2.3' 'torch_checkpointing>=0.1.0' torchao
folder() { [ -d "$dir/$1" ] || $pip --no-deps --ignore-requires-python --target "$dir/$1" "${@:2}"; }
for version in 0.17.1 0.18.2 0.19.2; do folder "megatron-$version" "megatron-core==$version"; done
folder torchtitan-0.3.0 torchtitan==0.3.0
folder bridge-0.6.2 megatron-bridge==0.6.2
folder bridge-0.6.2/deps hydra-core==1.3.4 antlr4-python3-runtime==4.9.3 transformers==5.12.1 tokenizers==0.22.2
echo "ready: $dir"
