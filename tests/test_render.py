"""Results as text: tables, CSV, JSON, launch scripts, and saved results read back."""

from __future__ import annotations

import csv
import io
import json
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from parsolve import Problem
from parsolve.api import check_result, make_plan
from parsolve.cli import main
from parsolve.evaluation import Violation
from parsolve.reading import parse_config
from parsolve.render import stages, words
from parsolve.render.data import to_csv, to_json
from parsolve.render.launch import script
from parsolve.render.table import Style, render_table
from parsolve.render.text import clean, columns, seconds, significant, wrap
from parsolve.result import SCHEMA_VERSION, Baseline, Infeasible, Relaxation, Result
from parsolve.schema import VERSION, first_fault, schema
from parsolve.specs import Model as ModelSpec
from parsolve.specs import MoE
from parsolve.units import fold_layers

Json = dict[str, Any]


def tiny(**changes: Any) -> ModelSpec:
    shape = {"name": "tiny", "num_layers": 8, "hidden_size": 512, "ffn_size": 2048, "num_heads": 8, "num_kv_heads": 8}
    return ModelSpec(**{**shape, "head_dim": 64, "vocab_size": 32000, **changes})


def problem(**changes: Any) -> Problem:
    model = changes.pop("model", tiny())
    return Problem(changes.pop("cluster", "a100-sxm-80gb:2x8"), model, **{"seq_len": 1024, "gbs": 64, **changes})


def result(texts: tuple[str, ...] = ("tp=2,pp=2,zero=1", "tp=4,mbs=2,zero=1"), **changes: Any) -> Result:
    """A result as the solver would return it, without solving."""
    given = changes.pop("problem", None) or problem()
    configs = [parse_config(text, given)[0] for text in texts]
    best = make_plan(given, configs[0]).estimate.step_time_s if configs else 1.0
    plans = tuple(make_plan(given, config, rank, float(rank)) for rank, config in enumerate(configs, 1))
    beside = Baseline("rule-of-thumb", configs[-1], 2 * best, 2.0) if configs else None
    fields: Json = {
        "status": "optimal",
        "plans": plans,
        "assumptions": ("a constant is assumed",),
        "best_value": best,
        "bound": best,
        "domains": {"tp": [1, 2, 4], "recompute": [0, 1, 2], "mbs": list(range(1, 9)), "dp": [1, 2]},
        "solver": {"wall_s": 0.1, "cpu_s": 0.1, "search_space": 1234567, "legal": None},
        "baseline": beside,
        "even_split": replace(beside, name="even") if beside else None,
    }
    return Result(given, **{**fields, **changes})


def infeasible() -> Result:
    conflict = (Violation("memory", "the worst stage needs 90 GiB, 10 GiB more than the 80 GiB", {}),)
    change = Relaxation("2 more domains", "memory", 1.5)
    found = Infeasible(conflict, "the model does not fit", (change, replace(change, step_time_s=None)))
    return result((), status="infeasible", bound=None, infeasible=found)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(to_json(result().to_json()))
    return path


def run(*args: object) -> Any:
    answer = CliRunner(env={"COLUMNS": "80"}).invoke(main, [str(arg) for arg in args])
    assert answer.exit_code != 101, answer.stderr
    return answer


# ---- tables --------------------------------------------------------------------------------------------------------
def test_table_holds_plans_breakdown_and_certificate() -> None:
    text = render_table(result().to_json(), Style(120))
    for part in (
        "plan 1: tp=2,pp=2",
        "placement: tp on NVLink 3",
        "time of a step",
        "memory, stage ",
        "outside",
        "limit",
    ):
        assert part in text, part
    assert "rule of thumb: tp=4,pp=1" in text
    assert "2.00 times slower" in " ".join(text.split())
    assert "best equal stages: tp=4" in text
    assert "(optimal; bound" in text
    assert "1,234,567 combinations in domains tp 1,2,4; recompute none,selective,full; mbs 1..8" in " ".join(
        text.split()
    )
    assert "dp 1,2" not in text
    assert "torchrun" in text


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_table_keeps_to_its_width(width: int) -> None:
    moe = tiny(moe=MoE(num_experts=8, top_k=2, ffn_size=512))
    texts = tuple(f"tp=2,pp=2,cp=2,ep=2,etp=1,vpp=2,mbs={mbs},recompute=selective,zero=1" for mbs in (1, 2, 4))
    data = result(texts, problem=problem(model=moe, seq_len=32768, gbs=None, gbs_tokens=4_000_000)).to_json()
    for line in render_table(data, Style(width)).splitlines():
        assert len(line) <= width or " " not in line.strip() or "torchrun" in line, line


def test_idle_columns_are_hidden() -> None:
    def header(*texts: str) -> str:
        lines = render_table(result(texts).to_json(), Style(120)).splitlines()
        return next(line for line in lines if line.startswith("#"))

    plain = header("tp=2,pp=2", "tp=4")
    assert " cp " not in plain
    assert " vpp " not in plain
    again = header("tp=2,cp=2", "tp=4,pp=2,vpp=2")
    assert " cp " in again
    assert " vpp " in again


def stage_lines(text: str, data: Json, width: int, unicode: bool = True) -> list[str]:
    """The rows of the bars for the first plan of a checked configuration."""
    found = stages.bars(data["plans"][0]["stages"], width, unicode)
    assert "\n".join(found) in text
    return [line for line in found if line.lstrip()[:1].isdigit()]


@pytest.mark.parametrize("width", [40, 60, 80, 140])
@pytest.mark.parametrize("unicode", [True, False])
def test_bars_show_every_rank_in_any_width(width: int, unicode: bool) -> None:
    data = result(("tp=1,pp=4,vpp=2,zero=1",)).to_json()
    text = render_table(data, Style(width, unicode=unicode))
    rows = stage_lines(text, data, width, unicode)
    assert len(rows) == 4
    states, activations, other, free = stages.MARKS[unicode]
    lengths = set()
    for row, stage in zip(rows, data["plans"][0]["stages"], strict=True):
        bar, memory = row.split()[-1], stage["memory_bytes"]
        assert len(row) <= width
        assert f"{memory['total'] / 2**30:.2f}" in row
        assert bar == "".join(mark * bar.count(mark) for mark in (states, activations, other, free))
        held = memory["parameters"] + memory["gradients"] + memory["optimizer"]
        assert bar.count(states) == pytest.approx(held / memory["limit"] * len(bar), abs=0.51)
        assert bar.count(free) == pytest.approx((1 - memory["total"] / memory["limit"]) * len(bar), abs=0.51)
        lengths.add(len(bar))
    assert len(lengths) == 1


@pytest.mark.parametrize("width", [40, 80])
def test_bars_beyond_the_limit_say_by_how_much(width: int) -> None:
    data = check_result(problem(model=tiny(num_layers=80, hidden_size=8192, ffn_size=28672)), "pp=2").to_json()
    rows = stage_lines(render_table(data, Style(width)), data, width)
    for row, stage in zip(rows, data["plans"][0]["stages"], strict=True):
        memory = stage["memory_bytes"]
        assert memory["total"] > memory["limit"]
        said = f"over by {(memory['total'] - memory['limit']) / 2**30:.2f}" if width > 40 else "over"
        assert row.endswith(said) and len(row) <= width


def test_equal_neighbours_share_a_bar() -> None:
    def stage(rank: int, layers: list[int], total: int) -> Json:
        return {"rank": rank, "layers": layers, "memory_bytes": {"total": total, "limit": 100, "parameters": total}}

    def names(rows: list[Json]) -> list[str]:
        return [line.split()[0] for line in stages.bars(rows, 80)[3:]]

    rows = [stage(0, [3], 50), stage(1, [4], 60), stage(2, [4], 60), stage(3, [4], 55)]
    assert names(rows) == ["0", "1-2", "3"]
    many = [stage(0, [3], 50), *(stage(i, [4], 90 - i) for i in range(1, 40)), stage(40, [2], 70)]
    lines = stages.bars(many, 80)
    assert names(many) == ["0", "1-39", "40"]
    assert "the fullest of neighbours" in lines[0] and f"{89 / 2**30:.2f}" in lines[4]
    assert stages.bars([], 80) == []
    assert stages.bars([stage(0, [], 0)], 80)


def test_one_stage_has_no_bars() -> None:
    assert "memory of each rank" not in render_table(result(("tp=2",)).to_json())


@pytest.mark.parametrize(
    ("even", "proven", "part"),
    [
        (None, True, "best equal stages: no equal cut is legal"),
        (None, False, "best equal stages: none found before the time limit"),
        ("tp=4,zero=1", True, "2.00 times slower"),
        ("tp=4,zero=1", False, "2.00 times slower (not proven the best of them)"),
        ("tp=2,pp=2,zero=1", True, "best equal stages: the best plan itself has them"),
    ],
)
def test_the_gain_over_equal_stages_is_said(even: str | None, proven: bool, part: str) -> None:
    beside = Baseline("even", parse_config(even, problem())[0], 1.0, 2.0) if even else None
    data = result(even_split=beside, solver={"even_split_proven": proven}).to_json()
    assert words.comparisons(data)[-1].endswith(part)


@pytest.mark.parametrize(
    ("cuts", "part"), [("any", "the fuller chunks first on all ranks or last on all"), ("listed", "as listed")]
)
def test_the_certificate_names_the_cuts(cuts: str, part: str) -> None:
    assert part in words.certificate(result(solver={"cuts": cuts, "search_space": 5}).to_json())


def test_what_would_help_takes_listed_cuts_also_where_any_were_asked_for() -> None:
    reason = Infeasible((), "", (Relaxation("drop pin tp=3", "pin tp=3", 2.0),))
    for cuts, part in (("any", "then at most 2.000 s a step"), ("listed", "then 2.000 s a step")):
        data = result(infeasible=reason, solver={"cuts": cuts}).to_json()
        assert words.conflict(data)[-1].endswith(part)


def test_another_plan_can_be_detailed() -> None:
    assert "plan 2: tp=4" in " ".join(render_table(result().to_json(), detail=2).split())


def test_table_without_unicode_is_ascii() -> None:
    assert render_table(result().to_json(), Style(unicode=False)).isascii()


def test_color_only_when_asked_for() -> None:
    assert "\x1b[" not in render_table(result().to_json())
    colored = render_table(result().to_json(), Style(color=True))
    assert "\x1b[1m" in colored


def test_infeasible_prints_conflict_and_what_helps() -> None:
    text = render_table(infeasible().to_json(), Style(100))
    assert "the model does not fit" in text
    assert "- memory: the worst stage needs 90 GiB" in text
    assert "- 2 more domains (drops memory), then 1.500 s a step" in text
    assert "infeasible: no configuration is legal, proven over" in text
    assert "rule of thumb" not in text


@pytest.mark.parametrize(
    ("status", "solver", "bound", "part"),
    [
        ("optimal", {}, 1.0, "no legal plan in these domains is faster than"),
        (
            "feasible",
            {},
            0.01,
            "not proven optimal: the time limit ran out; no legal plan in these domains is faster than 0.01",
        ),
        ("feasible", {}, 0.0, "the time limit ran out before there was any bound"),
        ("feasible", {"interrupted": True}, 0.01, "not proven optimal: interrupted; no legal plan"),
    ],
)
def test_certificate_claims_no_more_than_is_proven(status: str, solver: Json, bound: float, part: str) -> None:
    data = result(status=status, solver=solver, bound=bound).to_json()
    assert part in words.certificate(data)
    assert ("optimal;" in words.certificate(data)) == (status == "optimal")


def test_unknown_says_so() -> None:
    text = words.certificate(result((), status="unknown", bound=None).to_json())
    assert "before a legal plan was found or excluded" in text
    assert "no configuration is legal" not in text


def test_checks_are_worded() -> None:
    broken = check_result(problem(), "tp=3").to_json()
    text = render_table(broken, Style(100))
    assert "- attention_heads: tp=3" in text
    assert f"illegal: {len(broken['violations'])} rule(s) broken" in text
    assert "torchrun" not in text


def test_missing_estimate_is_printed_as_missing() -> None:
    data = result(("tp=2",)).to_json()
    data["plans"][0].update(estimate=None, limited_by=None)
    assert "no estimate can be computed" in render_table(data)
    assert len(list(csv.reader(io.StringIO(to_csv(data))))) == 2


# ---- CSV and JSON --------------------------------------------------------------------------------------------------
def test_csv_has_units_and_adds_up() -> None:
    data = result().to_json()
    rows = list(csv.DictReader(io.StringIO(to_csv(data))))
    assert [row["rank"] for row in rows] == ["1", "2"]
    for row, plan in zip(rows, data["plans"], strict=True):
        estimate = plan["estimate"]
        terms = [float(v) for k, v in row.items() if k.startswith("term_") and v]
        assert sum(terms) == pytest.approx(estimate["step_time_s"])
        parts = {k: int(v) for k, v in row.items() if k.startswith("memory_") and v}
        limit, total = parts.pop("memory_limit_bytes"), parts.pop("memory_total_bytes")
        assert sum(parts.values()) == total <= limit
        assert row["layers_per_stage"] in ("4*2", "8")


def test_csv_of_nothing_is_a_header() -> None:
    assert to_csv(infeasible().to_json()).count("\n") == 1


@pytest.mark.parametrize(
    "make",
    [result, infeasible, lambda: check_result(problem(), "tp=2,pp=2"), lambda: check_result(problem(), "tp=3,pp=5")],
)
def test_json_follows_its_schema(make: Callable[[], Result]) -> None:
    data = make().to_json()
    assert first_fault(schema("result"), json.loads(to_json(data))) is None


def test_schema_version_is_the_results() -> None:
    assert VERSION == SCHEMA_VERSION


def test_cluster_and_model_schemas_accept_the_presets() -> None:
    import tomllib
    from importlib import resources

    for kind in ("cluster", "model"):
        folder = resources.files("parsolve") / "data" / f"{kind}s"
        for entry in folder.iterdir():
            data = tomllib.loads(entry.read_text("utf-8"))
            assert first_fault(schema(kind), data) is None, entry.name


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        (("status",), "fine", "status"),
        (("plans", 0, "config", "tp"), "2", "plans[0].config.tp"),
        (("plans", 0, "config", "tp"), True, "plans[0].config.tp"),
        (("plans", 0, "config", "tp"), 0, "plans[0].config.tp"),
        (("plans", 0, "config", "tp"), 10**400, "plans[0].config.tp"),
        (("plans", 0, "config", "zero"), 4, "plans[0].config.zero"),
        (("plans", 1, "config", "recompute"), "some", "plans[1].config.recompute"),
        (("plans", 0, "estimate", "terms_s", "compute"), None, "plans[0].estimate.terms_s.compute"),
        (("plans", 0, "estimate", "step_time_s"), float("inf"), "plans[0].estimate.step_time_s"),
        (("baseline", "config"), None, "baseline.config"),
        (("problem",), [], "problem"),
        (("objective", "unit"), "h", "objective.unit"),
    ],
)
def test_schema_finds_the_fault(path: tuple[Any, ...], value: object, place: str) -> None:
    data = result().to_json()
    here: Any = data
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = value
    fault = first_fault(schema("result"), data)
    assert fault is not None
    assert fault[0] == place


def test_schema_misses_keys() -> None:
    data = result().to_json()
    del data["plans"][0]["config"]["pp"]
    assert first_fault(schema("result"), data) == ("plans[0].config", "the key 'pp' is missing")


# ---- saved results -------------------------------------------------------------------------------------------------
def test_saved_result_is_rendered_again(saved: Path) -> None:
    data = result().to_json()
    assert run("render", saved, "-f", "json", "-q").stdout == saved.read_text()
    assert run("render", saved).stdout == render_table(data)
    assert run("render", saved, "-f", "csv").stdout == to_csv(data)
    only = json.loads(run("render", saved, "-f", "json", "--plan", 2).stdout)
    assert [plan["rank"] for plan in only["plans"]] == [2]
    piped = CliRunner(env={"COLUMNS": "80"}).invoke(main, ["render", "-", "-q"], input=saved.read_text())
    assert piped.stdout == render_table(data)


def test_saved_plan_is_launched_as_the_fresh_one(saved: Path) -> None:
    fresh = result().plans[1].launch("megatron")
    answer = run("render", saved, "-f", "megatron", "--plan", 2, "-q")
    assert (answer.exit_code, answer.stderr) == (0, "")
    lines = answer.stdout.splitlines()
    command = "\n".join(line for line in lines if not line.startswith("#"))
    assert command == fresh.script()
    assert shlex.split(command.replace("\\\n", " ")) == shlex.split(fresh.line())
    assert subprocess.run(["bash", "-n"], input=answer.stdout, text=True).returncode == 0


def test_no_such_plan(saved: Path) -> None:
    answer = run("render", saved, "--plan", 9)
    assert answer.exit_code == 2
    assert "no plan 9; it has 1, 2" in answer.stderr


def test_saved_infeasible_result(tmp_path: Path) -> None:
    path = tmp_path / "no.json"
    path.write_text(to_json(infeasible().to_json()))
    assert run("render", path).exit_code == 1
    lines = run("render", path, "-f", "megatron")
    assert (lines.exit_code, lines.stdout) == (1, "")
    assert "conflict: - memory" in lines.stderr


def damaged(change: Callable[[Json], object]) -> str:
    data = json.loads(to_json(result().to_json()))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "not a saved result"),
        ('{"schema_version": 1, "x": NaN}', "NaN is not a number"),
        ("[" * 100_000, "nested too deeply"),
        (json.dumps({"tp": 2}), "no schema_version"),
        (damaged(lambda d: d.update(schema_version=2)), "this parsolve reads 1"),
        (damaged(lambda d: d.pop("plans")), "'plans' is missing"),
        (damaged(lambda d: d["plans"][0]["config"].update(tp="2")), "plans[0].config.tp"),
        (damaged(lambda d: d["problem"]["cluster"].pop("nic")), "problem.cluster: nic"),
        (damaged(lambda d: d["problem"]["model"].update(num_heads=7)), "problem.model"),
        (damaged(lambda d: d["problem"]["workload"].update(precision="int4")), "problem.workload: precision"),
        (damaged(lambda d: d["plans"][0]["config"].update(tp=4)), "tp*cp*pp*dp = 32 is not the 16 GPUs"),
        (damaged(lambda d: d["plans"][0]["config"].update(layers_per_stage=[[8]])), "pp=2 lists"),
        (damaged(lambda d: d["plans"][0]["config"].update(layers_per_stage=[[4], [5]])), "8 layers"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    answer = run("render", path, "-f", "megatron")
    assert answer.exit_code == 2
    assert answer.stdout == ""
    assert part in answer.stderr
    assert str(path) in answer.stderr


def test_binary_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert run("render", path).exit_code == 2
    assert run("render", tmp_path).exit_code == 2
    assert run("render", tmp_path / "none.json").exit_code == 2


# ---- launchers -----------------------------------------------------------------------------------------------------
def test_inexpressible_plan_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(to_json(result(("tp=2,cp=2,pp=2,zero=1",)).to_json()))
    answer = run("render", path, "-f", "deepspeed", "-q")
    assert (answer.exit_code, answer.stdout) == (2, "")
    assert "has no deepspeed command" in answer.stderr
    assert "--framework deepspeed" in answer.stderr


def _deepspeed(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "plan.json"
    given = problem(framework="deepspeed", cluster="a100-sxm-80gb:1x8", **changes)
    path.write_text(to_json(result(("dp=8,zero=2",), problem=given).to_json()))
    return path


def test_deepspeed_script_makes_its_file(tmp_path: Path) -> None:
    text = run("render", _deepspeed(tmp_path), "-f", "deepspeed", "-q").stdout
    made = text.split("END_OF_FILE")[1].removeprefix("'\n")
    assert json.loads(made)["zero_optimization"]["stage"] == 2
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_deepspeed_folder_holds_script_and_files(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    answer = run("render", _deepspeed(tmp_path), "-f", "deepspeed", "-o", folder)
    assert (answer.exit_code, answer.stdout) == (0, "")
    names = {path.name for path in folder.iterdir()}
    assert "launch.sh" in names
    assert any(name.endswith(".json") for name in names)


def test_several_files_go_into_a_folder_or_one_script(tmp_path: Path) -> None:
    """The host file, which names the user's own hosts, is left alone where there is one."""
    words = ("check", "h100-sxm:2x8", "llama2-7b", "--seq-len", "2048", "--gbs", "64", "--config", "zero=2", "-q")
    words += ("--framework", "deepspeed", "-f", "deepspeed")
    assert run(*words, "-o", tmp_path / "new").exit_code == 0
    names = {"ds_config.json", "hostfile"}
    assert {file.name for file in (tmp_path / "new").iterdir()} == {"launch.sh", *names}
    place = tmp_path / "run"
    place.mkdir()
    text = f"deepspeed() {{ :; }}\ncd {shlex.quote(str(place))}\nset -e\n{run(*words).stdout}"
    for hosts in ("host0 slots=8\nhost1 slots=8\n", "mine slots=8\nyours slots=8\n"):
        assert subprocess.run(["bash", "-c", text], capture_output=True).returncode == 0
        assert {file.name for file in place.iterdir()} == names
        assert (place / "hostfile").read_text() == hosts
        (place / "hostfile").write_text("mine slots=8\nyours slots=8\n")


HOSTILE = "x\nrm -rf / #\x1b[31m [red]$(touch pwned)`id`'\"\u202e"


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    given = problem(model=tiny(name=HOSTILE))
    made = result(problem=given)
    table = render_table(made.to_json(), Style(100))
    assert "\x1b" not in table
    assert "\u202e" not in table
    assert "[red]" in table
    assert not any(line.startswith("rm ") for line in table.splitlines())
    text = script(made.plans[0].launch("megatron"), f"plan for {HOSTILE}")
    stub = f"torchrun() {{ :; }}\ncd {shlex.quote(str(tmp_path))}\nset -e\n{text}"
    assert subprocess.run(["bash", "-c", stub], capture_output=True).returncode == 0
    assert not (tmp_path / "pwned").exists()
    commands = text.split("\nCUDA_DEVICE_MAX_CONNECTIONS")[0].splitlines()
    assert all(line.startswith("#") for line in commands)


def test_hostile_file_name_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "\x1b[31mred.toml"
    path.write_text("num_layers = x")
    answer = run("models", path)
    assert answer.exit_code == 2
    assert "\x1b" not in answer.stderr


# ---- small helpers -------------------------------------------------------------------------------------------------
def test_text_helpers() -> None:
    assert clean("a\tb\x1b\n\u202e") == r"a\tb\x1b\n\u202e"
    assert fold_layers([[15], *[[16]] * 6, [15]]) == "15|16*6|15"
    assert fold_layers([[1, 2], [3, 4]]) == "1|3|2|4"
    assert [significant(x) for x in (0, 12.345, 0.012345, 123456.7, 1e-9)] == ["0", "12.3", "0.0123", "123457", "1e-09"]
    assert [seconds(x) for x in (0, 1.5, 2e-3, 3e-6, 4e-9)] == ["0 s", "1.500 s", "2.000 ms", "3.000 µs", "4.000 ns"]
    assert columns([("a", "1"), ("bb", "22")], ("x", "y"), numbers=(1,)) == "x    y\na    1\nbb  22"
    assert columns([]) == ""
    assert wrap("one two", 40, "  ", "") == "one two"
