"""Commands as people paste them: shells, schedulers, variables, slips; each read as the shell would, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch_problems import problem

from parsolve.errors import SpecError
from parsolve.from_megatron import Today, read_megatron, slip_of
from parsolve.shell_words import shell_words

FLAGS_FILE = Path(__file__).parents[2] / "shared" / "launch" / "megatron_flags.json"
PLAIN = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096"
PLAIN += " --micro-batch-size 1 --bf16"
SHAPE, REST = "--num-layers 32 --hidden-size 4096", PLAIN.replace("--num-layers 32 --hidden-size 4096 ", "")


def read(text: str) -> Today:
    return read_megatron(text, problem(cluster="h100-sxm:2x8").cluster, None, (0, 19))


@pytest.mark.parametrize(
    "text",
    [
        f"torchrun pretrain_gpt.py {PLAIN} --tensor-model-parallel-size 2",
        f"torchrun pretrain_gpt.py {PLAIN} --tensor-model-parallel-size=2",
        f"$ /opt/conda/bin/torchrun --nproc_per_node=8 --nnodes=2 /work/pretrain_gpt.py {PLAIN} "
        "--tensor-model-parallel-size 2",
        f"python3 -u -m torch.distributed.run --nnodes $N pretrain_gpt.py {PLAIN} --tensor-model-parallel-size 2",
        f"deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py {PLAIN} --tensor-model-parallel-size 2",
        f"srun -N 2 --container-image=a/b bash -c 'torchrun --nproc_per_node 8 pretrain_gpt.py {PLAIN} "
        "--tensor-model-parallel-size 2'",
        f"cd /a && . env.sh && torchrun pretrain_gpt.py {PLAIN} --tensor-model-parallel-size 2 2>&1 | tee log.txt",
        f"torchrun pretrain_gpt.py {PLAIN} --tensor-model-parallel-size 2 > log 2>&1 &",
        f"torchrun pretrain_gpt.py {PLAIN} --tensor-model-parallel-size 2; echo done",
        f"torchrun \\\n pretrain_gpt.py \\ \n {PLAIN} \\\t\r\n --tensor-model-parallel-size 2",
        f"torchrun pretrain_gpt.py\n{PLAIN}\n--tensor-model-parallel-size 2\n",
        f"TP=2\ntorchrun pretrain_gpt.py {PLAIN} --tensor-model-parallel-size ${{TP}}",
        f"torchrun pretrain_gpt.py {PLAIN} --tensor-model-parallel-size ${{TP:-2}}",
        f"TP=${{1:-2}}\ntorchrun pretrain_gpt.py {PLAIN} --tensor-model-parallel-size $TP",
        f"GPUS=8\nTP=$(( GPUS / (2 + 2) ))\ntorchrun pretrain_gpt.py {PLAIN} --tensor-model-parallel-size $TP",
        f'OPTIONS="\n {SHAPE} \\\n --tensor-model-parallel-size 2"\ntorchrun pretrain_gpt.py $OPTIONS {REST}',
        f"OPTIONS=({SHAPE}\n --tensor-model-parallel-size 2)\ntorchrun pretrain_gpt.py ${{OPTIONS[@]}} {REST}",
        f'A="{SHAPE}"\nB="$A --tensor-model-parallel-size 2"\nCMD="torchrun pretrain_gpt.py $B {REST}"\neval $CMD',
        f"torchrun pretrain_gpt.py {PLAIN} --data-path $DATA --load $(pwd)/x --tensor-model-parallel-size 2",
        f"torchrun pretrain_gpt.py {PLAIN} —tensor-model-parallel-size 2 –-save “a b”".replace("–-", "–"),
    ],
)
def test_it_is_read_as_the_shell_would(text: str) -> None:
    today = read(text)
    assert today.model is not None and today.model.num_layers == 32 and today.model.hidden_size == 4096
    assert (today.config["tp"], today.fields["seq_len"]) == (2, 4096)
    assert not any("not understood" in note for note in today.notes), today.notes
    assert {v.rule for v in today.violations} <= {"launch_environment"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no such file"),
        (f"torchrun pretrain_mamba.py {PLAIN}", "pretrain_mamba"),
        (f"torchrun pretrain_t5.py {PLAIN}", "pretrain_t5"),
        (PLAIN + " --hybrid-override-pattern M-M*", "not modelled"),
        (PLAIN + " --heterogeneous-layers-config-path x.json", "not modelled"),
        (PLAIN + " --optimizer muon", "muon"),
        ("torchrun pretrain_gpt.py --yaml-cfg conf.yaml", "give it to --from-megatron"),
        (PLAIN.replace("--hidden-size 4096", "--hidden-size 4096.0"), "whole number"),
        (f"deepspeed --num_nodes 4 --num_gpus 8 pretrain_gpt.py {PLAIN}", "32 processes"),
        ("A=1\n" + "A=$A$A$A$A$A$A$A$A\n" * 30 + PLAIN, "without end"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read(text)


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--tensor_model_parallel_size", "--tensor-model-parallel-size"),
        ("--tensor-model-parallel", "--tensor-model-parallel-size"),
        ("--sequence-paralel", "--sequence-parallel"),
        ("--micro-batchsize", "--micro-batch-size"),
    ],
)
def test_slips_would_not_start(option: str, meant: str) -> None:
    assert slip_of(option) == meant
    today = read(f"{PLAIN} {option} 2")
    found = [v.message for v in today.violations if v.rule == "unknown_option"]
    assert len(found) == 1 and option in found[0] and meant in found[0]
    assert today.config["tp"] == 1, "what the program does not take has no effect"


def test_no_real_option_is_taken_for_a_slip() -> None:
    if not FLAGS_FILE.exists():
        pytest.skip("the table of launcher options is not here")
    names = {name for row in json.loads(FLAGS_FILE.read_text())["flags"] for name in row["flags"]}
    assert len(names) > 800
    assert {name: slip_of(name) for name in names if slip_of(name)} == {}


@pytest.mark.parametrize(
    "text",
    [
        "ENV_VARS:\n  CUDA_DEVICE_MAX_CONNECTIONS: 1\nMODEL_ARGS:\n  --num-layers: 4\n  --hidden-size: 64\n"
        "  --num-attention-heads: 8\n  --seq-length: 128\n  --max-position-embeddings: 128\n  --micro-batch-size: 2\n"
        "  --bf16: true\n  --fp16: false\n  --tensor-model-parallel-size: 2\nTEST_TYPE: regular\nMETRICS: [lm loss]\n",
        "language_model:\n  num_layers: 4\n  hidden_size: 64\n  num_attention_heads: 8\n"
        "  max_position_embeddings: 128\n"
        "model_parallel:\n  tensor_model_parallel_size: 2\nseq_length: 128\nmicro_batch_size: 2\nbf16: true\n",
    ],
)
def test_tables_of_arguments(text: str, tmp_path: Path) -> None:
    file = tmp_path / "model_config.yaml"
    file.write_text(text)
    today = read(str(file))
    assert today.model is not None and today.model.num_layers == 4
    assert (today.config["tp"], today.config["mbs"], today.fields["precision"]) == (2, 2, "bf16")
    assert not any("not understood" in note for note in today.notes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=3 B=$((A*2+1)) x $B", ["A=3", "B=7", "x", "7"]),
        ("x $(( (9 - 1) / 2 % 3 ))", ["x", "1"]),
        ("x $((1/0)) $((y)) $((1+))", ["x", "$((1/0))", "$((y))", "$((1+))"]),
        ("x $UNKNOWN ${UNKNOWN} ${UNKNOWN:-5}", ["x", "$UNKNOWN", "${UNKNOWN}", "5"]),
        ("x 'a b' # rest", ["x", "a b"]),
        ("x '$(rm -rf /)' `ls`", ["x", "$(rm -rf /)", "`ls`"]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert shell_words(text)[0] == words
