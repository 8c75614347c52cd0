"""What every command prints as JSON fits the schemas that `parsolve schema` prints, and says nothing beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from parsolve.cli import main
from parsolve.schema import first_fault, schema

PLACE = ("h100-sxm:1x8", "llama2-7b", "--seq-len", "4096")
SMALL = (*PLACE, "--gbs", "64")
LINE = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096"
LINE += " --micro-batch-size 1 --global-batch-size 64 --bf16 --swiglu --warp-drive 9"
TODAY = ("check", "h100-sxm:1x8", "--from-megatron", LINE)


def printed(*words: str) -> Any:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(main, [*words, "--json"] if "-f" not in words else list(words))
    assert result.exit_code in (0, 1), result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    "words",
    [
        ("solve", *SMALL),
        ("solve", *SMALL, "--explain", "--top", "2"),
        ("solve", *SMALL, "--pareto"),
        ("solve", *SMALL, "--within", "5%", "--distinct", "--objective", "memory"),
        ("solve", *PLACE, "--gbs-tokens", "300k", "--objective", "throughput"),
        ("solve", *SMALL, "--shard-group", "4", "--framework", "torchtitan"),
        ("solve", *SMALL, "--framework", "deepspeed", "--top", "1"),
        ("solve", "h100-sxm:1x2", "llama2-70b", "--seq-len", "4096", "--gbs", "64"),
        ("check", *SMALL, "--config", "tp=2", "--explain"),
        ("check", *SMALL, "--config", "tp=3"),
        ("check", *SMALL, "--config", "tp=8,pp=2", "--better"),
        (*TODAY, "--better"),
        TODAY,
        ("check", "h100-sxm:1x2", "--from-megatron", LINE + " --tensor-model-parallel-size 4", "--better"),
    ],
    ids=lambda words: " ".join(words)[:60],
)
def test_results(words: tuple[str, ...]) -> None:
    root, data = schema("result"), printed(*words)
    assert first_fault(root, data) is None
    assert set(data) <= set(root["properties"])
    for name, option in (("today", "--from-megatron"), ("better", "--better")):
        assert (name in data) == (option in words)
        described = root["properties"][name]
        described = described.get("anyOf", [described])[0]
        assert set(data.get(name) or ()) <= set(described["properties"])


def test_a_deepspeed_file_and_a_saved_result(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": 64, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
    data = printed("check", *PLACE, "--from-deepspeed", str(file), "--better")
    assert first_fault(schema("result"), data) is None and data["today"]["slow"]
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(data))
    assert first_fault(schema("result"), printed("render", str(saved), "-f", "json")) is None


def test_a_fault_in_them_is_found() -> None:
    data = printed(*TODAY, "--better")
    root = schema("result")
    assert first_fault(root, {**data, "today": {"notes": []}}) == ("today", "the key 'slow' is missing")
    better = {**data["better"], "speedup": "2"}
    assert first_fault(root, {**data, "better": better}) == ("better.speedup", "expected number, got '2'")


@pytest.mark.parametrize(
    ("command", "name", "kind"), [("models", "qwen3-30b-a3b", "model"), ("clusters", "h100-sxm:2x8", "cluster")]
)
def test_shapes(command: str, name: str, kind: str) -> None:
    assert first_fault(schema(kind), printed(command, name)) is None
