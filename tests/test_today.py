"""Commands and files of today read back: Megatron-LM lines, DeepSpeed JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from launch_problems import SHAPES, config, model, problem, random_plans

from parsolve.cli import main
from parsolve.errors import NotExpressibleError, SpecError
from parsolve.from_deepspeed import read_deepspeed
from parsolve.from_megatron import layout_counts, read_megatron
from parsolve.from_megatron_model import layer_flags
from parsolve.launchers import launch
from parsolve.launchers.megatron import layout_text
from parsolve.problem import Problem
from parsolve.reading import parse_config

PLAIN = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096"
PLAIN += " --micro-batch-size 1 --global-batch-size 128 --bf16"


def test_what_is_printed_reads_back() -> None:
    """Every random line gives the same model, workload and configuration again."""
    lines = 0
    for p, plan in random_plans("0.19", 120):
        try:
            made = launch("megatron", p, plan)
        except NotExpressibleError:
            continue
        today = read_megatron(made.script(), p.cluster, None, p.version)
        assert today.model is not None
        assert not today.notes, today.notes
        assert not today.violations, today.violations
        again = Problem(p.cluster, today.model, **{**today.fields, "framework_version": "0.19"})
        assert parse_config(today.config, again)[0] == plan
        assert again.workload.precision == p.workload.precision
        lines += 1
    assert lines > 60


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_read_back(shape: dict[str, object]) -> None:
    """Shapes that Megatron-LM has exactly keep their size; what its notes say differs may differ by vectors."""
    p = problem(model(**shape))
    made = launch("megatron", p, config(p))
    today = read_megatron(made.line(), p.cluster, None, p.version)
    assert today.model is not None
    exact = not any("bias" in note for note in made.notes)
    assert abs(today.model.num_params / p.model.num_params - 1) < (1e-12 if exact else 1e-3)


@pytest.mark.parametrize("counts", [[4, 5, 4, 3], [0, 2, 2, 1, 1, 0], [3], [1] * 7, [3, 4, 4, 4, 2, 2]])
def test_layouts_read_back(counts: list[int]) -> None:
    assert layout_counts(layout_text(counts)) == counts


def test_per_layer_patterns() -> None:
    assert layer_flags("([0]*3+[1]*58)", 61, "x") == [False] * 3 + [True] * 58
    assert layer_flags("([1]+[0])*2", 4, "x") == [True, False, True, False]
    assert layer_flags("2", 4, "x", every=True) == [True, False, True, False]
    assert layer_flags("4", 4, "x") == [True, True, True, False]
    for text in ("__import__('os')", "[1]*4", "([1]", "[2]*8"):
        with pytest.raises(SpecError):
            layer_flags(text, 8, "x")


def read(line: str, cluster: str = "h100-sxm:2x8") -> tuple[Problem, dict[str, object], list[str]]:
    p = problem(cluster=cluster)
    today = read_megatron(line, p.cluster, None, (0, 19))
    assert today.model is not None
    faults = [v.rule for v in today.violations]
    return Problem(p.cluster, today.model, **today.fields), today.config, [*today.notes, *today.slow, *faults]


def test_megatrons_defaults() -> None:
    p, axes, remarks = read(PLAIN)
    assert (p.model.ffn_size, p.model.num_kv_heads, p.model.position, p.model.norm) == (16384, 32, "learned", "layer")
    assert p.model.tied_embeddings and p.model.mlp_bias and p.model.vocab_size == 50257
    assert axes == {"tp": 1, "pp": 1, "cp": 1, "mbs": 1, "zero": 0, "recompute": "none", "vpp": 1}
    assert any("use-distributed-optimizer" in remark for remark in remarks)
    assert read(PLAIN + " --swiglu")[0].model.ffn_size == 10880


def test_scripts_with_variables_and_arrays(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "#!/bin/bash\n# a comment with --flags\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\nTP=4\nGPUS_PER_NODE=8\n"
        f"MODEL_ARGS=(\n  {PLAIN}\n  --sequence-parallel)\n"
        "torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py ${MODEL_ARGS[@]} \\\n"
        '  --tensor-model-parallel-size "$TP" --use-distributed-optimizer\n'
    )
    p, axes, remarks = read(str(script))
    assert (axes["tp"], axes["zero"], p.workload.sequence_parallel) == (4, 1, True)
    assert "launch_environment" not in remarks


def test_what_is_not_understood_is_said() -> None:
    assert any("--warp-drive 9" in remark for remark in read(PLAIN + " --warp-drive 9")[2])
    assert not any("--lr" in remark for remark in read(PLAIN + " --lr 1e-4")[2])
    assert "launch_environment" in read(PLAIN + " --tensor-model-parallel-size 2")[2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (PLAIN.replace("--seq-length 4096", ""), "--seq-length"),
        (PLAIN + " --tensor-model-parallel-size $TP", "shell variable"),
        (PLAIN + " 'open", "split into words"),
        ("torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py " + PLAIN, "32 processes"),
        (PLAIN + " --tokenizer-type HuggingFaceTokenizer", "add --vocab-size"),
        (PLAIN + " --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 6", "middle stages"),
        ("nothing.sh", "no such file"),
    ],
)
def test_what_cannot_be_read(line: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read(line)


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(main, ["check", *words])
    return result.exit_code, result.stdout, result.stderr


def test_check_tells_what_is_illegal_slow_and_better() -> None:
    line = PLAIN + " --tensor-model-parallel-size 8 --use-distributed-optimizer --swiglu"
    code, out, err = run("h100-sxm:1x8", "--from-megatron", line, "--better", "--json")
    data = json.loads(out)
    assert code == 1 and data["status"] == "illegal"
    assert [v["rule"] for v in data["violations"]] == ["launch_environment"]
    assert data["better"]["speedup"] > 1 and data["today"]["slow"]
    assert "slow: " in err and "better: " in err


def test_what_is_wrong_in_a_file_names_it(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(PLAIN + " --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Ettt|ttL'")
    code, _, err = run("h100-sxm:1x8", "--from-megatron", str(file))
    assert code == 2
    assert f"{file}: --pipeline-model-parallel-layout: has 5 layers, the model 32" in " ".join(err.split())


def test_what_is_better_than_an_unequal_layout_is_looked_for_over_all_cuts() -> None:
    words = (
        "h100-sxm:2x8",
        "llama2-7b",
        "--seq-len",
        "4096",
        "--gbs",
        "64",
        "--pin",
        "pp=4",
        "--pin",
        "vpp=2",
        "--better",
    )
    config = "tp=1,pp=4,dp=4,vpp=2,mbs=1,zero=1,layers_per_stage=5|4*6|3"
    code, out, err = run(*words, "--config", config, "--json")
    better = json.loads(out)["better"]
    assert code == 0 and better["status"] == "optimal"
    assert "better: the best plan takes" in err
    code, out, err = run(*words, "--config", "tp=1,pp=4,dp=4,vpp=2,mbs=1,zero=1", "--json")
    assert "better: the best plan with cuts as listed takes" in err
    assert json.loads(out)["better"]["step_time_s"] > better["step_time_s"]


def test_check_reads_deepspeed(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    base = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    file.write_text(json.dumps({**base, "zero_optimization": {"stage": 3}, "zero_optimisation": {}}))
    words = ("h100-sxm:2x8", "llama2-7b", "--seq-len", "4096", "--from-deepspeed", str(file))
    code, out, err = run(*words, "--json")
    data = json.loads(out)
    assert code == 0 and "zero_optimisation" in err
    assert (data["plans"][0]["config"]["zero"], data["plans"][0]["config"]["grad_acc"]) == (3, 2)
    code, out, _ = run(*words, "--config", "pp=2", "--json")
    assert "zero_with_pipeline" in [v["rule"] for v in json.loads(out)["violations"]]


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
            "batch_triple",
        ),
        ({"train_batch_size": 64, "amp": {}}, "removed_key"),
        ({"train_batch_size": 64, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, "one_precision"),
    ],
)
def test_deepspeed_faults(content: dict[str, object], rule: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(content))
    assert rule in [v.rule for v in read_deepspeed(str(file), problem().cluster, {}).violations]


def test_options_of_torchrun_in_an_array_are_torchruns(tmp_path: Path) -> None:
    """As NVIDIA's example scripts have them: named with underscores, before the launcher's name."""
    file = tmp_path / "train.sh"
    arrays = "D=(\n --nproc_per_node 8\n --nnodes 2\n --node_rank 0\n --master_addr localhost --master_port 6000\n)\n"
    file.write_text(f"{arrays}M=(\n{PLAIN}\n)\ntorchrun ${{D[@]}} pretrain_gpt.py ${{M[@]}}\n")
    code, _, err = run("h100-sxm:2x8", "--from-megatron", str(file))
    assert code in (0, 1) and "not understood" not in err
    code, _, err = run("h100-sxm:4x8", "--from-megatron", str(file))
    assert code == 2 and "2*8 = 16 processes" in err


@pytest.mark.parametrize(
    ("more", "size"),
    [("", 4), (" --grad-reduce-in-bf16", 2), (" --fp16", 2), (" --fp16 --accumulate-allreduce-grads-in-fp32", 4)],
)
def test_bytes_of_a_gradient(more: str, size: int) -> None:
    line = (PLAIN.replace(" --bf16", "") if "fp16" in more else PLAIN) + more
    code, out, err = run("h100-sxm:1x8", "--from-megatron", line, "--json", "--better")
    data = json.loads(out)
    assert code in (0, 1) and "not understood" not in err
    held = data["plans"][0]["estimate"]["memory_bytes"]["gradients"]
    assert held == pytest.approx(size * data["problem"]["model"]["num_params"], rel=1e-3)  # and the padded vocabulary
    assert data["problem"]["workload"]["gradient_bytes"] in (None, size)


def test_a_growing_batch_is_said() -> None:
    _, _, err = run("h100-sxm:1x8", "--from-megatron", PLAIN + " --rampup-batch-size 16 16 5859375 --decoupled-lr 5e-4")
    assert "--rampup-batch-size: the estimate is for the batch" in err and "not understood" not in err


DEEPSPEED: dict[str, object] = {"train_batch_size": 64, "bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization: stage"),
        ({"zero_optimization": {"stage": "three"}}, "zero_optimization: stage"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": "8"}}, "zero_hpz_partition_size"),
        ({"train_batch_size": 0}, "train_batch_size"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"tensor_parallel": {"autotp_size": "2"}}, "tensor_parallel: autotp_size"),
        ({"fp16": True}, "fp16"),
        ({"bf16": {"enabled": "yes"}}, "bf16: enabled"),
    ],
)
def test_deepspeed_values_that_cannot_be_read(changes: dict[str, object], place: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**DEEPSPEED, **changes}))
    with pytest.raises(SpecError) as caught:
        read_deepspeed(str(file), problem().cluster, {})
    assert str(file) in str(caught.value) and place in str(caught.value)


def test_the_command_line_and_the_deepspeed_file_must_agree(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**DEEPSPEED, "zero_optimization": {"stage": 2}}))
    for axes in ({"zero": 3}, {"mbs": 2}, {"grad_acc": 2}):
        with pytest.raises(SpecError, match="--config says"):
            read_deepspeed(str(file), problem().cluster, axes)
    words = ("h100-sxm:2x8", "llama2-7b", "--seq-len", "4096", "--from-deepspeed", str(file))
    code, out, _ = run(*words, "--config", "recompute=full,zero=2", "--json")
    assert (code, json.loads(out)["plans"][0]["config"]["recompute"]) == (0, "full")
    code, _, err = run(*words, "--from-megatron", PLAIN)
    assert code == 2 and "only one of" in err


def test_a_layout_of_another_number_of_layers_is_called_by_its_option() -> None:
    line = PLAIN + " --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*2|t*99L'"
    code, _, err = run("h100-sxm:1x8", "--from-megatron", line)
    assert code == 2 and "--pipeline-model-parallel-layout: has 101 layers" in err


AUTO = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    **{name: {"enabled": "auto"} for name in ("fp16", "bf16")},
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": True},
}


@pytest.mark.parametrize(
    ("given", "axes", "batch", "precision"),
    [
        ({"gbs": 64, "precision": "bf16"}, {}, (64, 4, 1), "bf16"),
        ({"gbs": 64, "precision": "fp16"}, {"mbs": 2}, (64, 2, 2), "fp16"),
        ({"gbs": None}, {"mbs": 2, "grad_acc": 3}, (96, 2, 3), "bf16"),
    ],
)
def test_deepspeed_auto_comes_from_the_command_line(
    given: dict[str, object], axes: dict[str, int], batch: tuple[int, int, int], precision: str, tmp_path: Path
) -> None:
    """Files for transformers' Trainer leave the batch, and both 16-bit types, to its arguments."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(AUTO))
    today = read_deepspeed(str(file), problem().cluster, axes, given)
    assert (today.fields["gbs"], today.config["mbs"], today.config["grad_acc"]) == batch
    assert today.fields["precision"] == precision
    assert not today.violations
    assert any("auto" in note for note in today.notes)


def test_deepspeed_auto_without_a_batch_says_how(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(AUTO))
    with pytest.raises(SpecError, match=r"auto.*--gbs"):
        read_deepspeed(str(file), problem().cluster, {})
    file.write_text(json.dumps({**AUTO, "zero_optimization": {"stage": "auto"}}))
    with pytest.raises(SpecError, match="stage"):
        read_deepspeed(str(file), problem().cluster, {}, {"gbs": 64})


def test_deepspeeds_second_copy_and_removed_keys(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    zero = {"stage": 3, "zero_hpz_partition_size": 8, "mics_shard_size": 8}
    file.write_text(json.dumps({"train_batch_size": 64, "bf16": {"enabled": True}, "zero_optimization": zero}))
    today = read_deepspeed(str(file), problem().cluster, {})
    assert today.fields["shard_group"] == 8
    assert [v.rule for v in today.violations] == ["removed_key"] and "mics" in today.violations[0].message
