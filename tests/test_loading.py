"""Whatever a user writes becomes a cluster, a model, or an error that names the place and the mend."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsolve import presets
from parsolve.errors import SpecError, UnknownNameError
from parsolve.loading import load_cluster, load_model, read_file
from parsolve.specs import Model

TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_size": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
}
CLUSTER_TOML = 'gpu = "h100-sxm"\ndomains = 2\ngpus_per_domain = 8\n'


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# ---- files ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.toml", 'a = 1\n[b]\nc = "x"\n'),
        ("a.TOML", 'a = 1\n[b]\nc = "x"\n'),
        ("a.yaml", "a: 1\nb: {c: x}\n"),
        ("a.yml", "---\na: 1\nb:\n  c: x\n"),
        ("a.json", '{"a": 1, "b": {"c": "x"}}'),
        ("bom.json", b'\xef\xbb\xbf{"a": 1, "b": {"c": "x"}}'),
        ("no_suffix", ' {"a": 1, "b": {"c": "x"}}'),
        ("crlf.toml", 'a = 1\r\n[b]\r\nc = "x"\r\n'),
    ],
)
def test_three_formats_one_table(tmp_path: Path, name: str, content: str | bytes) -> None:
    assert read_file(write(tmp_path / name, content)) == {"a": 1, "b": {"c": "x"}}
    assert read_file(str(tmp_path / name)) == {"a": 1, "b": {"c": "x"}}


def test_a_few_aliases_are_fine(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "nic: &n {bandwidth: 400Gb/s}\nfast_link: *n\n")
    assert read_file(path)["fast_link"] == {"bandwidth": "400Gb/s"}


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 15))
WIDE_BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
MERGE_BOMB = "a0: &a0 {k: v}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 30))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "", "the file is empty"),
        ("a.json", " \n\t ", "the file is empty"),
        ("a.toml", "# nothing\n", "the file has no keys"),
        ("a.yaml", "# nothing\n", "the file has no keys"),
        ("a.json", "{}", "the file has no keys"),
        ("a.json", "[1]", "expected a table of keys at the top level, got list"),
        ("a.yaml", "- 1\n", "expected a table of keys at the top level, got list"),
        ("a.yaml", "just words\n", "expected a table of keys at the top level, got str"),
        ("a.txt", "a = 1\n", "cannot tell the format; name the file .toml, .yaml"),
        ("a.toml", b"a = 1\x00", "is a binary file"),
        ("a.json", b'{\n"a": "\xff"}', ": line 2: is not UTF-8"),
        ("a.json", '{"a": 1}'.encode("utf-16"), "not UTF-8|binary"),
        ("a.toml", "a = 1\nb = = 2\n", ": line 2: not valid TOML: "),
        ("a.toml", "a = 1\na = 2\n", ": line 2: not valid TOML: Cannot overwrite a value"),
        ("a.toml", "a = " + "9" * 5000, "not valid TOML"),
        ("a.json", '{\n"a": 1,\n}', ": line 3: not valid JSON: "),
        ("a.json", '{"a": 1} x', ": line 1: not valid JSON: Extra data"),
        ("a.json", '{"a": 1,\n"b": {"a": 1},\n"a": 2}', ": line 1, 2, 3: the key 'a' occurs twice; keep one"),
        ("a.json", '{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ("a.yaml", "a: 1\nb: 2\na: 3\n", ": line 3: not valid YAML: the key 'a' occurs twice; keep one"),
        ("a.yaml", "a: 1\n  b: 2\n", ": line 2: not valid YAML: "),
        ("a.yaml", "a: [1\n", ": line 2: not valid YAML: "),
        ("a.yaml", "a: 1\n---\na: 2\n", ": line 2: not valid YAML: "),
        ("a.yaml", "a: !!python/object/apply:os.system [ls]\n", ": line 1: not valid YAML: could not determine"),
        ("a.yaml", "a: !!int x\n", "not valid YAML"),
        ("a.yaml", "a: !!bool x\n", "not valid YAML"),
        ("a.yaml", "a: !!timestamp x\n", "not valid YAML"),
        ("a.yaml", "a: 2024-99-99\n", "not valid YAML"),
        ("a.yaml", "a: 2024-01-01\n", ": a: cannot use a date here; quote it"),
        ("a.yaml", "a: !!set {x}\n", ": a: cannot use a set here"),
        ("a.yaml", "8: x\n", ": line 1: not valid YAML: keys must be text"),
        ("a.yaml", "[a, b]: x\n", ": line 1: not valid YAML: keys must be text"),
        ("a.yaml", "a: *x\n", ": line 1: not valid YAML: found undefined alias"),
        ("a.yaml", "a: &a [*a]\n", "too many or too deeply nested"),
        ("a.yaml", BOMB, "too many or too deeply nested"),
        ("a.yaml", WIDE_BOMB, "more than 30 aliases"),
        ("a.yaml", MERGE_BOMB, "merges|more than 30 aliases"),
        ("a.yaml", "a: &a {k: v}\nb: {<<: *a}\n", ": line 2: not valid YAML: .*merges"),
        ("a.yaml", "a: " + "[" * 5000, "nested too deeply"),
        ("a.yaml", "a: " + "{a: " * 5000, "nested too deeply"),
        ("a.json", '{"a": ' + "[" * 100_000, "nested too deeply"),
        ("a.json", '{"a": ' + "[" * 60 + "]" * 60 + "}", "too deeply nested"),
        ("a.toml", "a = " + "[" * 20_000, "nested too deeply"),
        ("a.json", '{"b": {"a": NaN}}', ": b.a: nan is not a finite number"),
        ("a.json", '{"a": [-Infinity]}', ": a: -inf is not a finite number"),
        ("a.json", '{"a": 1e999}', ": a: inf is not a finite number"),
        ("a.toml", "a = nan\n", ": a: nan is not a finite number"),
        ("a.yaml", "a: .inf\n", ": a: inf is not a finite number"),
        ("a.json", r'{"a": "\ud800"}', ": a: holds a control character or a broken character"),
        ("a.json", r'{"a": "\u001b[31m"}', ": a: holds a control character"),
        ("a.json", r'{"\ud800": 1}', "holds a control character or a broken character"),
        ("a.json", '{"a": "' + "x" * 2**20 + '"}', "is larger than 1 MiB"),
    ],
)
def test_refused_files(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(SpecError, match=f"^{re.escape(str(path))}.*({message})") as caught:
        read_file(path)
    str(caught.value).encode()
    assert len(str(caught.value)) < 400


def test_refused_paths(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is a folder, not a file"):
        read_file(tmp_path)
    with pytest.raises(SpecError, match="no such file"):
        read_file(tmp_path / "none.toml")
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(SpecError, match="is not a regular file"):
        read_file(tmp_path / "pipe.toml")
    with pytest.raises(SpecError, match="name too long"):
        read_file(tmp_path / ("x" * 5000 + ".toml"))
    with pytest.raises(SpecError):
        read_file("nul\0byte.toml")
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    with pytest.raises(SpecError):
        read_file(tmp_path / "loop.toml")


def test_a_hugging_face_config_may_hold_infinity(tmp_path: Path) -> None:
    path = write(tmp_path / "config.json", '{"model_type": "x", "time_step_limit": [0.0, Infinity]}')
    assert read_file(path)["model_type"] == "x"


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.binary(max_size=60), st.sampled_from(["toml", "yaml", "json"]))
def test_any_bytes_are_a_table_or_a_spec_error(tmp_path_factory: pytest.TempPathFactory, raw: bytes, kind: str) -> None:
    path = write(tmp_path_factory.getbasetemp() / f"fuzz.{kind}", raw)
    with contextlib.suppress(SpecError):
        assert isinstance(read_file(path), dict)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.text(alphabet="ab:x1,-[]{}&*!'\"#|>%@<.\n \t", max_size=40))
def test_any_yaml_is_a_table_or_a_spec_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = write(tmp_path_factory.getbasetemp() / "fuzz.yaml", text)
    with contextlib.suppress(SpecError):
        assert isinstance(read_file(path), dict)


# ---- clusters ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "name", "domains", "used", "processes", "hosts"),
    [
        ("h100-sxm:16x8", "h100-sxm:16x8", 16, 8, 8, 16),
        ("H100:2X8", "h100-sxm:2x8", 2, 8, 8, 2),
        ("A100-80GB-SXM:1x4", "a100-sxm-80gb:1x4", 1, 4, 4, 1),
        ("gb200-nvl72:16x64", "gb200-nvl72:16x64", 16, 64, 4, 256),
        ("gb200-nvl72:1x72", "gb200-nvl72:1x72", 1, 72, 4, 18),
        ("gb200-nvl72:3x2", "gb200-nvl72:3x2", 3, 2, 2, 3),
        ("t4:4x1", "t4:4x1", 4, 1, 1, 4),
    ],
)
def test_shapes(text: str, name: str, domains: int, used: int, processes: int, hosts: int) -> None:
    cluster = load_cluster(text)
    assert (cluster.name, cluster.domains, cluster.gpus_per_domain) == (name, domains, used)
    assert (cluster.processes_per_host, cluster.hosts) == (processes, hosts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100-sxm:0x8", "must be 1 or more; write h100-sxm:NxG"),
        ("h100-sxm:2x0", "must be 1 or more"),
        ("h100-sxm:-2x8", "must be 1 or more"),
        ("h100-sxm:16", "'16' does not say how many GPUs a domain has; write h100-sxm:NxG, .* e.g. h100-sxm:16x8"),
        ("h100-sxm:", "cannot read ''; write h100-sxm:NxG"),
        ("h100-sxm:x8", "cannot read 'x8'"),
        ("h100-sxm:2.5x8", "cannot read '2.5x8'"),
        ("h100-sxm:2x8x2", "cannot read '2x8x2'"),
        ("h100-sxm:1e3x8", "cannot read '1e3x8'"),
        ("h100-sxm:٢x8", "cannot read"),
        (f"h100-sxm:{'9' * 5000}x8", "cannot read"),
        ("h100-sxm: 2 x 8", "write it without blanks: h100-sxm:2x8"),
        ("h100-sxm:2x16", "has 8 GPUs, not 16; write h100-sxm:4x8, or a cluster file"),
        ("h100-sxm:1x9", "has 8 GPUs, not 9; write h100-sxm:Nx8"),
        ("gb200-nvl72:1x128", "has 72 GPUs, not 128"),
        ("gb200-nvl72:1x6", "6 is not a multiple of gpus_per_host 4"),
        ("h100-sx:2x8", "unknown gpu preset 'h100-sx'; did you mean h100-sxm"),
        (":2x8", "unknown gpu preset ''"),
        ("h100-sxm", "'h100-sxm' is a GPU; say how many: h100-sxm:NxG, e.g. h100-sxm:2x8"),
        ("dgx-h10", r"unknown cluster \(neither GPU:NxG nor a preset nor a file\) 'dgx-h10'; did you mean dgx-h100"),
        ("", "cluster: the name is empty"),
        ("./none.toml", "none.toml: no such file"),
    ],
)
def test_refused_clusters(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_cluster(text)


def test_clusters_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "mine.toml", CLUSTER_TOML)
    cluster = load_cluster(path)
    assert (cluster.name, cluster.num_gpus) == ("mine", 16)
    assert load_cluster(str(path)) == cluster
    assert load_cluster(cluster) is cluster
    assert load_cluster(cluster.model_dump()) == cluster
    assert load_cluster("dgx-h100") == presets.load_cluster_preset("DGX_H100")
    table = {"gpu": "h100-sxm", "domains": 2, "gpus_per_domain": 8}
    assert load_cluster(table) == load_cluster("h100-sxm:2x8")
    monkeypatch.chdir(tmp_path)
    assert load_cluster("mine.toml") == load_cluster("./mine.toml")
    (tmp_path / "dgx-h100").mkdir()
    assert load_cluster("dgx-h100").name == "dgx-h100", "a preset comes before a file of the same name"
    with pytest.raises(SpecError, match="is a folder"):
        load_cluster("./dgx-h100")
    with pytest.raises(SpecError, match=r"mime.toml: no such file; did you mean mine.toml\?"):
        load_cluster("mime.toml")
    with pytest.raises(UnknownNameError, match=r"did you mean mine.toml\?"):
        load_cluster("mine.tom")
    write(tmp_path / "bad.toml", CLUSTER_TOML + "nodes = 2\n")
    with pytest.raises(UnknownNameError, match=r"^bad.toml: nodes: unknown key 'nodes'"):
        load_cluster("bad.toml")


@pytest.mark.parametrize("source", [None, 5, ["h100-sxm:2x8"], True])
def test_wrong_types(source: Any) -> None:
    with pytest.raises(SpecError, match="expected a name, a file or a dict"):
        load_cluster(source)
    with pytest.raises(SpecError, match="expected a name, a file or a dict"):
        load_model(source)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.one_of(st.text(max_size=20), st.from_regex(r"\A(h100-sxm|t4|gb200)?:?[0-9x -]{0,8}\Z")))
def test_any_text_is_a_cluster_or_a_spec_error(text: str) -> None:
    with contextlib.suppress(SpecError):
        assert load_cluster(text).num_gpus >= 1
    with contextlib.suppress(SpecError):
        assert load_model(text).num_params >= 1


# ---- models --------------------------------------------------------------------------------------------------------
def test_models_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "tiny.json", json.dumps(TINY))
    model = load_model(path)
    assert (model.name, model.num_layers) == ("tiny", 4)
    assert load_model(model) is model
    assert load_model({**TINY, "name": "tiny"}) == model
    assert load_model(model.model_dump()) == model
    monkeypatch.chdir(tmp_path)
    assert load_model("tiny.json") == model
    with pytest.raises(SpecError, match=r"the folder has no config\.json"):
        load_model(tmp_path)
    with pytest.raises(SpecError, match=r"tinny.json: no such file; did you mean tiny.json\?"):
        load_model("tinny.json")
    with pytest.raises(UnknownNameError, match=r"unknown model \(neither a preset nor a file\) 'no-such-model'"):
        load_model("no-such-model")
    with pytest.raises(SpecError, match="is a gpu preset; the cluster comes first"):
        load_model("h100-sxm:2x8")
    with pytest.raises(SpecError, match="is a cluster preset; the cluster comes first"):
        load_model("dgx-h100")
    with pytest.raises(SpecError, match="model: the name is empty"):
        load_model(" ")


def test_model_errors_name_the_file_and_the_key(tmp_path: Path) -> None:
    path = write(tmp_path / "m.json", json.dumps({**TINY, "num_kv_heads": 3}))
    with pytest.raises(SpecError, match=r"m\.json: num_kv_heads 3 does not divide num_heads 4"):
        load_model(path)
    path = write(tmp_path / "m.toml", "num_layer = 4\n")
    with pytest.raises(SpecError, match=r"m\.toml: "):
        load_model(path)
    path = write(tmp_path / "c.json", json.dumps({"num_hidden_layers": 4, "hidden_size": 64}))
    with pytest.raises(SpecError, match="looks like a Hugging Face config, but has no model_type"):
        load_model(path)


@pytest.mark.parametrize("name", presets.model_names()[:1])
def test_model_presets(name: str) -> None:
    assert load_model(name) == load_model(name.upper()) == presets.load_model_preset(name)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("name", ["config.json", "llama.json", "config.txt", "config.yaml"])
def test_hugging_face_configs_are_known_by_their_model_type(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, json.dumps(LLAMA))
    model = load_model(path)
    assert isinstance(model, Model)
    assert (model.num_layers, model.num_kv_heads, model.ffn_size) == (4, 2, 256)
    if name == "config.json":
        assert load_model(tmp_path) == load_model(str(tmp_path)) == model
    assert load_model(LLAMA).num_params == model.num_params
