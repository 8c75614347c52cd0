"""The commands as a user calls them: exit codes, streams, misuse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from parsolve.cli import COMMANDS, main
from parsolve.commands import options

CLUSTER = "a100-sxm-80gb:1x8"
SHAPE = """num_layers = 4
hidden_size = 512
ffn_size = 2048
num_heads = 8
num_kv_heads = 8
head_dim = 64
vocab_size = 32000
"""
ROOT = Path(__file__).parents[1]


def run(*args: object, env: dict[str, str] | None = None) -> Result:
    result = CliRunner(env={"COLUMNS": "100", **(env or {})}).invoke(main, [str(arg) for arg in args])
    assert result.exit_code != 101, result.stderr
    return result


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(SHAPE)
    return path


def size(gbs: object = 16) -> tuple[object, ...]:
    return ("--seq-len", 1024, "--gbs", gbs)


# ---- every command -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_ends_in_an_example(command: str | None) -> None:
    result = run(*([command] if command else []), "--help")
    assert result.exit_code == 0
    assert "Example" in result.stdout
    assert f"parsolve {command or 'solve'} " in result.stdout.split("Example")[1]


def test_command_reference_is_current() -> None:
    page = ROOT / "docs" / "cli.md"
    script = types.ModuleType("generate_cli")
    script.__file__ = str(page.with_name("generate_cli.py"))
    exec(compile(Path(script.__file__).read_text(encoding="utf-8"), script.__file__, "exec"), script.__dict__)
    assert page.read_text(encoding="utf-8") == script.reference(), "run python docs/generate_cli.py"


def test_choices_are_those_of_the_specs() -> None:
    from parsolve.specs import workload

    assert typing.get_args(workload.Framework) == options.FRAMEWORKS
    assert typing.get_args(workload.Precision) == options.PRECISIONS
    assert typing.get_args(workload.Optimizer) == options.OPTIMIZERS


def test_unknown_command_gets_a_suggestion() -> None:
    result = run("sovle")
    assert result.exit_code == 2
    assert "did you mean solve?" in result.stderr


@pytest.mark.parametrize("kind", ["gpus", "models", "clusters"])
def test_presets_are_listed(kind: str) -> None:
    from parsolve import presets

    names = {"gpus": presets.gpu_names, "models": presets.model_names, "clusters": presets.cluster_names}[kind]()
    table, data = run(kind), run(kind, "-f", "json")
    assert (table.exit_code, data.exit_code) == (0, 0)
    assert all(name in table.stdout for name in names)
    assert [item["name"] for item in json.loads(data.stdout)] == list(names)


@pytest.mark.parametrize(
    ("command", "name", "part"),
    [
        ("gpus", "H100", "NVIDIA H100 datasheet"),
        ("gpus", "dgx-h100", "NVIDIA H100 datasheet"),
        ("models", "llama2-7b", "6,738,415,616"),
        ("models", "mixtral-8x7b", "moe.num_experts = 8"),
        ("clusters", "h100-sxm:16x8", "128 GPUs on 16 host(s), 8 processes each"),
        ("clusters", "gb200-nvl72:1x64", "64 GPUs on 16 host(s), 4 processes each"),
    ],
)
def test_one_preset_shows_numbers_and_origins(command: str, name: str, part: str) -> None:
    result = run(command, name)
    assert result.exit_code == 0
    assert part in " ".join(result.stdout.split())
    assert run(command, name, "--json").stdout.startswith("{")


def test_model_file_is_shown_as_read(model: Path) -> None:
    data = json.loads(run("models", model, "-f", "json").stdout)
    assert data["name"] == "tiny"
    assert data["num_params"] == data["num_active_params"] > 0
    assert data["embedding_and_head_params"] == 2 * 32000 * 512
    assert data["routed_expert_params"] == 0


def test_multimodal_config_needs_text_only(tmp_path: Path) -> None:
    text = {"model_type": "mistral", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000}
    whole = {"model_type": "mistral3", "tie_word_embeddings": False, "text_config": text, "vision_config": {"x": 1}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(whole))
    refused = run("models", path)
    assert refused.exit_code == 2
    assert "--text-only" in refused.stderr
    read = run("models", path, "--text-only", "--json")
    assert (read.exit_code, json.loads(read.stdout)["num_layers"]) == (0, 2)
    assert "left out" in read.stderr
    done = run("check", CLUSTER, path, *size(), "--text-only", "--config", "dp=8", "-f", "json")
    assert done.exit_code == 0


def test_explain_lists_and_shows_everything() -> None:
    from parsolve.explaining import KINDS, catalogue

    entries = catalogue()
    assert {entry.kind for entry in entries} == set(KINDS)
    listing = run("explain").stdout
    for entry in entries:
        assert entry.name in listing
        assert entry.doc, entry.name
        assert entry.code(), entry.name
    shown = run("explain", "attention_core").stdout
    assert "FlashAttention-2" in shown
    assert "parsolve.objectives.compute, line" in shown
    assert "def attention_core(p: Instance" in shown
    assert "attention_tensor_comm" in run("explain", "tp_comm").stdout
    assert "def pipeline_time" in run("explain", "bubble").stdout
    assert json.loads(run("explain", "memory", "-f", "json").stdout)[0]["kind"] == "limit"
    assert run("explain", "tp_com").exit_code == 2


def test_explain_profile_has_unit_and_origin(tmp_path: Path) -> None:
    data = json.loads(run("explain", "profile", "-f", "json").stdout)
    assert data["name"] == "default"
    assert data["constants"]["outside_bytes"]["unit"] == "bytes"
    assert all(constant["source"] for constant in data["constants"].values())
    assert "outside_bytes" in run("explain", "profile").stdout
    assert run("explain", "profile", "--profile", tmp_path / "none.toml").exit_code == 2


# ---- check and solve -----------------------------------------------------------------------------------------------
def test_check_passes(model: Path) -> None:
    result = run("check", CLUSTER, model, *size(), "--config", "tp=2,mbs=1,zero=1")
    assert result.exit_code == 0
    assert "legal: the configuration breaks no rule" in result.stdout
    assert "--tensor-model-parallel-size 2" in result.stdout
    assert "assumption:" in result.stderr


def test_check_names_what_is_broken(model: Path) -> None:
    result = run("check", CLUSTER, model, *size(), "--config", "tp=3,mbs=1", "-f", "json")
    data = json.loads(result.stdout)
    assert (result.exit_code, data["status"]) == (1, "illegal")
    assert {"rule", "message", "values"} <= set(data["violations"][0])
    assert "attention_heads" in {violation["rule"] for violation in data["violations"]}
    assert data["plans"][0]["args"]["megatron"] is None
    assert data["plans"][0]["estimate"] is not None
    lines = run("check", CLUSTER, model, *size(), "--config", "tp=3,mbs=1", "-f", "megatron")
    assert (lines.exit_code, lines.stdout) == (1, "")
    assert "attention_heads" in lines.stderr


def test_check_obeys_restrictions(model: Path) -> None:
    args = ("check", CLUSTER, model, *size(), "--config", "tp=2,mbs=1")
    assert run(*args, "--pin", "tp=1,2").exit_code == 0
    refused = run(*args, "--max", "tp=1", "--require", "tp*cp == 1")
    assert refused.exit_code == 1
    assert "max tp=1" in refused.stdout
    assert "tp*cp == 1 does not hold" in refused.stdout


def test_an_axis_without_values_is_named(model: Path) -> None:
    result = run("solve", CLUSTER, model, *size(), "--pin", "tp=3")
    assert result.exit_code == 1
    assert "domains tp none;" in " ".join(result.stdout.split())


def test_all_cuts_asked_for_in_vain_are_said(model: Path) -> None:
    result = run("solve", CLUSTER, model, *size(), "--cuts", "any", "--objective", "memory")
    assert result.exit_code == 0
    assert "cuts: as listed: the goal is not the step time alone" in result.stderr
    result = run("solve", CLUSTER, model, *size(), "--cuts", "any", "--framework", "deepspeed")
    assert "cuts: as listed: deepspeed takes no layout of the stages" in result.stderr
    result = run("solve", "h100-sxm:1x1", model, *size(), "--cuts", "any")
    assert "cuts: as listed: no pipeline of several stages is possible" in result.stderr
    assert "looks at all" not in " ".join(result.stdout.split())


def test_solve_prints_plans_and_proof(model: Path) -> None:
    result = run("solve", CLUSTER, model, *size(), "--top", 3, "--explain")
    assert result.exit_code == 0
    flat = " ".join(result.stdout.split())
    assert "no legal plan in these domains is faster than" in flat
    assert "combinations in domains tp 1,2,4,8" in flat
    assert "rule of thumb:" in flat
    assert "attention_core(tp, cp, mbs, recompute), s:" in flat
    assert "torchrun" in result.stdout


def test_solve_top_all_lists_every_legal_plan(model: Path) -> None:
    pins = ("--pin", "recompute=none", "--pin", "vpp=1", "--pin", "cp=1", "--pin", "zero=0,1")
    data = json.loads(run("solve", CLUSTER, model, *size(8), "--top", "all", *pins, "--json").stdout)
    assert len(data["plans"]) == data["solver"]["legal"] > 5
    costs = [plan["estimate"]["step_time_s"] for plan in data["plans"]]
    assert costs == sorted(costs)


def test_restrictions_hold(model: Path) -> None:
    args = ("--pin", "tp=2,4", "--forbid", "recompute=full", "--min", "pp=2", "--max", "mbs=2", "--require", "tp*pp<=4")
    data = json.loads(run("solve", CLUSTER, model, *size(), *args, "-f", "json").stdout)
    for plan in data["plans"]:
        config = plan["config"]
        assert config["tp"] == config["pp"] == 2
        assert config["recompute"] != "full"
        assert config["mbs"] <= 2


def test_repeated_output_is_identical_but_for_the_clock(model: Path) -> None:
    texts = []
    for _ in range(2):
        data = json.loads(run("solve", CLUSTER, model, *size(), "-f", "json").stdout)
        for key in ("wall_s", "cpu_s"):
            assert data["solver"].pop(key) >= 0
        texts.append(json.dumps(data))
    assert texts[0] == texts[1]
    args = ("solve", CLUSTER, model, *size(), "-f")
    for name in ("table", "csv", "megatron"):
        assert run(*args, name).stdout == run(*args, name).stdout


def test_quiet_leaves_stderr_empty_and_stdout_alone(model: Path) -> None:
    args = ("solve", CLUSTER, model, *size())
    loud, quiet = run(*args), run(*args, "-q")
    assert quiet.stderr == ""
    assert quiet.stdout == loud.stdout
    assert "assumption" in loud.stderr


def test_output_goes_to_a_file(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.csv"
    result = run("solve", CLUSTER, model, *size(), "-f", "csv", "-o", target)
    assert (result.exit_code, result.stdout) == (0, "")
    assert target.read_text().startswith("rank,tp,pp,")


def test_token_targets_and_bands(model: Path) -> None:
    tokens = ("--seq-len", 1024, "--gbs-tokens", "16K")
    data = json.loads(run("solve", CLUSTER, model, *tokens, "--gbs-tolerance", "25%", "-f", "json").stdout)
    assert data["objective"]["unit"] == "s/token"
    assert {plan["config"]["gbs"] for plan in data["plans"]} <= set(range(12, 21))
    assert "16K tokens +- 25 %" in run("solve", CLUSTER, model, *tokens, "--gbs-tolerance", "25%").stdout


# ---- the answer is no ----------------------------------------------------------------------------------------------
def test_infeasible_is_explained(model: Path) -> None:
    result = run("solve", CLUSTER, model, *size(), "--memory-reserve", "79GiB")
    assert result.exit_code == 1
    assert "infeasible: no configuration is legal" in result.stdout
    assert "memory" in result.stdout
    data = json.loads(run("solve", CLUSTER, model, *size(), "--memory-reserve", "79GiB", "--json").stdout)
    assert data["status"] == "infeasible"
    assert data["plans"] == []
    assert data["objective"]["best"] is data["objective"]["bound"] is None
    assert any(rule["rule"] == "memory" for rule in data["infeasible"]["conflict"])


def test_a_model_far_too_large() -> None:
    result = run("solve", CLUSTER, "megatron-1t", "--seq-len", 2048, "--gbs", 512, "-q")
    assert result.exit_code == 1
    assert "GiB" in result.stdout


@pytest.mark.parametrize("gpus", [7, 127])
def test_prime_worlds_have_an_answer(model: Path, gpus: int) -> None:
    cluster = "a100-sxm-80gb:1x7" if gpus == 7 else f"a100-sxm-80gb:{gpus}x1"
    result = run("solve", cluster, model, *size(2 * gpus), "-f", "json", "-q")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["plans"][0]["config"]["dp"] in (1, gpus)


def test_batch_smaller_than_the_world_allows(model: Path) -> None:
    result = run("solve", "a100-sxm-80gb:7x1", model, *size(3), "-q", "--max", "pp=1", "--max", "cp=1")
    assert result.exit_code == 1
    assert "global_batch" in result.stdout


def test_time_limit_before_any_plan() -> None:
    args = ("h100-sxm:64x8", "deepseek-v3", "--seq-len", 4096, "--gbs", 1024, "--time-limit", "1us")
    result = run("solve", *args, "--top", 1, "-f", "json")
    assert result.exit_code in (0, 3)  # the rule of thumb may be a plan
    assert json.loads(result.stdout)["status"] in ("feasible", "unknown")


# ---- misuse --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["h1000:1x8", "MODEL", "--gbs", "8"], "did you mean h100"),
        (["a100-sxm-80gb", "MODEL", "--gbs", "8"], "say how many"),
        (["MODEL", "llama2-7b", "--gbs", "8"], "gpu"),
        (["CLUSTER", "llama2-7c", "--gbs", "8"], "did you mean llama2-7b"),
        (["CLUSTER", "./none.toml", "--gbs", "8"], "no such file"),
        (["CLUSTER", "MODEL"], "--gbs 1024"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--gbs-tokens", "1M"], "only one of"),
        (["CLUSTER", "MODEL", "--gbs", "0"], "greater than 0"),
        (["CLUSTER", "MODEL", "--gbs", "-4"], "cannot read '-4'"),
        (["CLUSTER", "MODEL", "--gbs", "2.5"], "not a whole number"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--gbs-tolerance", "200%"], "below 100%"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--memory-reserve", "6Gb"], "bits"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--memory-reserve", "-6GiB"], "cannot read"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--time-limit", "0s"], "greater than 0"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--time-limit", "soon"], "as a time"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--top", "0"], "from 1 up"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--pin", "tp"], "axis=value"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--pin", "ttp=2"], "did you mean tp"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--pin", "tp=1", "--pin", "tp=2"], "write --pin tp=1,2"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--max", "pp=1,2"], "one value"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--pin", "recompute=some"], "recompute mode"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--require", "tp*cp"], "compare it"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--require", "__import__('os')"], "nothing else"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--framework", "megatrn"], "megatron"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--framework-version", "0.1"], "0.12 to 0.20"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--precision", "fp8"], "has no fp8"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--profile", "defualt"], "did you mean default"),
        (["CLUSTER", "MODEL", "--gbs", "8", "-f", "megatorn"], "did you mean megatron"),
        (["CLUSTER", "MODEL", "--gbs", "8", "-o", "/no/such/folder/plan.json"], "does not exist"),
        (["CLUSTER", "MODEL", "--gbs", "8", "-o", "/", "-f", "json"], "is a folder"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--tp", "8"], "No such option"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--slurm"], "-f megatron"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--slurm", "--json"], "-f megatron"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--slurm", "-f", "deepspeed"], "ssh"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--json", "-f", "csv"], "only one of"),
        (["CLUSTER", "MODEL", "--gbs", "8", "--zero-quantized", "both"], "DeepSpeed"),
    ],
)
def test_misuse_exits_2_and_says_how_to_mend_it(args: list[str], part: str, model: Path) -> None:
    words = [{"CLUSTER": CLUSTER, "MODEL": str(model)}.get(arg, arg) for arg in args]
    result = run("solve", *words, "--seq-len", "1024")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert part in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "config", ["tp", "tp=2,foo=1", "tp=0", "tp=2,tp=4", "layers_per_stage=3|1x", "none.json", "zero=4"]
)
def test_a_config_that_cannot_be_read(model: Path, config: str) -> None:
    assert run("check", CLUSTER, model, *size(), "--config", config).exit_code == 2


def test_typo_in_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "typo.toml"
    path.write_text(SHAPE.replace("num_heads", "num_hedas"))
    result = run("solve", CLUSTER, path, *size())
    assert result.exit_code == 2
    assert "typo.toml: num_hedas" in result.stderr
    assert "did you mean num_heads" in result.stderr


def test_negative_size_in_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "negative.toml"
    path.write_text(SHAPE.replace("ffn_size = 2048", "ffn_size = -2048"))
    result = run("solve", CLUSTER, path, *size())
    assert result.exit_code == 2
    assert "negative.toml: ffn_size" in result.stderr


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "t5", "num_layers": 12, "d_model": 768, "is_encoder_decoder": True}))
    result = run("solve", CLUSTER, path, *size())
    assert result.exit_code == 2
    assert "model_type" in result.stderr
    assert "t5" in result.stderr


# ---- schema --------------------------------------------------------------------------------------------------------
def test_schemas_are_printed() -> None:
    for what in ("cluster", "model", "result"):
        data = json.loads(run("schema", what).stdout)
        assert data["$schema"].startswith("https://json-schema.org")
        assert data["properties"]
    assert set(json.loads(run("schema").stdout)) == {"cluster", "model", "result"}
    assert run("schema", "plan").exit_code == 2


# ---- processes -----------------------------------------------------------------------------------------------------
def _python(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "absent"),
    [
        (["--help"], ("ortools", "numpy", "rich", "pydantic")),
        (["solve", "--help"], ("ortools", "rich")),
        (["gpus"], ("ortools", "numpy", "rich")),
        (["check", CLUSTER, "llama2-7b", "--seq-len", "1024", "--gbs", "8", "--config", "tp=2"], ("ortools",)),
        (
            ["check", CLUSTER, "llama2-7b", "--seq-len", "1024", "--gbs", "8", "--config", "tp=2", "--json"],
            ("ortools", "rich"),
        ),
        (["explain", "memory"], ("ortools", "rich")),
    ],
)
def test_start_is_light(args: list[str], absent: tuple[str, ...]) -> None:
    code = f"""
import sys
from parsolve.cli import main
try:
    main({args!r}, prog_name="parsolve")
except SystemExit:
    pass
print([name for name in {absent!r} if name in sys.modules])
"""
    assert _python(code) == "[]"


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m parsolve models -f json | head -c 10; echo; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


def test_a_full_disk_is_an_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "parsolve", "models"], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
    assert done.returncode == 2
    assert "stdout: cannot be written" in done.stderr


def test_ctrl_c_exits_130() -> None:
    """In the midst of a search over many batches, as its first line of progress tells."""
    args = ["solve", "h100-sxm:64x8", "deepseek-v3", "--seq-len", "4096", "--gbs", "2048", "--gbs-tolerance", "30%"]
    args += ["--cuts", "any", "--time-limit", "60", "-f", "json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "parsolve", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("progress"):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    if out:  # a plan was found before
        assert json.loads(out)["solver"]["interrupted"] is True


def test_a_bug_is_101_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("parsolve.presets.gpu_names", broken)
    result = CliRunner().invoke(main, ["gpus"])
    assert result.exit_code == 101
    assert "a bug in parsolve: ZeroDivisionError" in result.stderr
    assert "Traceback" not in result.stderr
    monkeypatch.setenv("PARSOLVE_DEBUG", "1")
    assert isinstance(CliRunner().invoke(main, ["gpus"]).exception, ZeroDivisionError)
