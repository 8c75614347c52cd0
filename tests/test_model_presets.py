"""Model presets: well formed, sourced, and exact against counts of the real model code or published tables."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from parsolve.specs.model import Model

FOLDER = Path(__file__).parents[1] / "parsolve/data/models"
FILES = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.toml"))}

# The parameters that the model code of transformers 5.24.0 creates for the published config.json.
EXACT = {
    "bloom-176b": 176_247_271_424,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2-1.5b": 1_557_611_200,
    "kimi-k2": 1_026_408_209_408,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama2-7b": 6_738_415_616,
    "llama3.1-405b": 405_853_388_800,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x22b": 140_620_634_112,
    "mixtral-8x7b": 46_702_792_704,
    "nemotron-4-340b": 341_029_195_776,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-14b": 14_768_307_200,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-8b": 8_190_735_360,
}
# Billions, as printed: Narayanan et al. 2021, tables 1 and 2; Korthikanti et al. 2022, table 3 (22B).
PRINTED = {
    "gpt3-175b": "174.6",
    "megatron-145b": "145.6",
    "megatron-1t": "1008.0",
    "megatron-22b": "22.1",
    "megatron-310b": "310.1",
    "megatron-530b": "529.6",
}


def model(data: dict[str, Any]) -> Model:
    return Model.read({key: value for key, value in data.items() if key != "aliases"}, data["name"])


def test_every_preset_has_its_count() -> None:
    assert set(FILES) == set(EXACT) | set(PRINTED)


@pytest.mark.parametrize("name", FILES)
def test_well_formed(name: str) -> None:
    spec = model(FILES[name])
    assert spec.name == name == name.lower()
    assert spec.sources["shape"]
    assert FILES[name]["aliases"]


def test_no_name_means_two_models() -> None:
    names = [name for stem, data in FILES.items() for name in (stem, *data["aliases"])]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", EXACT)
def test_exact_count(name: str) -> None:
    assert model(FILES[name]).num_params == EXACT[name]


@pytest.mark.parametrize("name", PRINTED)
def test_printed_count(name: str) -> None:
    assert f"{model(FILES[name]).num_params / 1e9:.1f}" == PRINTED[name]


@pytest.mark.parametrize("name", PRINTED)
def test_closed_formula(name: str) -> None:
    """P = 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)), Narayanan et al. 2021, equation 2; ours adds the final norm."""
    m = model(FILES[name])
    layers, h = m.num_layers, m.hidden_size
    assert m.num_params - 2 * h == 12 * layers * h * h + 13 * layers * h + (m.vocab_size + 2048) * h


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("mixtral-8x7b", 12.9),
        ("qwen3-30b-a3b", 3.3),
        ("qwen3-235b-a22b", 22.2),
        ("deepseek-v3", 37.6),
        ("kimi-k2", 32.9),
    ],
)
def test_active_parameters_in_billions(name: str, active: float) -> None:
    assert model(FILES[name]).num_active_params / 1e9 == pytest.approx(active, abs=0.06)
