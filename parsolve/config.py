"""One configuration: the integer choices of a plan, as a user writes them and as results print them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parsolve.specs import Recompute
from parsolve.splits import Layers
from parsolve.units import fold_layers


@dataclass(frozen=True, order=True)
class Config:
    """All axes of one plan. ``gbs`` and ``microbatches`` follow from them; the order of fields breaks ties.

    ``recompute_layers``: layers at the start of every chunk that are recomputed under recompute=block, else 0.
    ``mtp_apart``: multi-token-prediction modules are on the stage before the output layer's, not beside it.

    Ties in step time are broken by the smaller value of the first field that differs, in the order below: simpler
    plans (less tensor, pipeline, context parallelism, less recomputation) come first.
    """

    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    vpp: int
    zero: int
    recompute: Recompute
    mbs: int
    grad_acc: int
    dp: int
    edp: int
    layers_per_stage: Layers
    sequence_parallel: bool
    recompute_layers: int = 0
    mtp_apart: bool = False

    @property
    def cut(self) -> tuple[Layers, int, bool]:
        """What ``Splits.index`` knows a cut by: layers, how many of each chunk are recomputed, ``mtp_apart``."""
        return self.layers_per_stage, self.recompute_layers, self.mtp_apart

    @property
    def mtp_rank(self) -> int:
        """The pipeline rank that has the prediction modules, where there are any."""
        return self.pp - 1 - self.mtp_apart

    @property
    def gbs(self) -> int:
        """Global batch size, sequences."""
        return self.dp * self.mbs * self.grad_acc

    def axes(self) -> dict[str, int]:
        """The decision axes by name (``split`` excepted)."""
        names = ("tp", "cp", "pp", "ep", "etp", "dp", "edp", "zero", "mbs", "grad_acc", "vpp", "recompute_layers")
        values = {name: int(getattr(self, name)) for name in names}
        return {**values, "shards": self.dp * self.cp, "recompute": int(self.recompute)}

    def to_json(self) -> dict[str, Any]:
        """The ``config`` object of the JSON output."""
        names = ("dp", "tp", "pp", "cp", "ep", "etp", "edp", "zero", "mbs", "grad_acc")
        return {
            **{name: int(getattr(self, name)) for name in names},
            "microbatches": self.grad_acc,
            "gbs": self.gbs,
            "vpp": self.vpp,
            "recompute": self.recompute.text,
            "recompute_layers": self.recompute_layers,
            "sequence_parallel": self.sequence_parallel,
            "layers_per_stage": [list(rank) for rank in self.layers_per_stage],
            "mtp_apart": self.mtp_apart,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Config:
        """Read back what ``to_json`` wrote."""
        names = ("dp", "tp", "pp", "cp", "ep", "etp", "edp", "zero", "mbs", "grad_acc", "vpp")
        return Config(
            **{name: int(data[name]) for name in names},
            recompute=Recompute[str(data["recompute"]).upper()],
            recompute_layers=int(data.get("recompute_layers", 0)),
            sequence_parallel=bool(data["sequence_parallel"]),
            layers_per_stage=tuple(tuple(int(n) for n in rank) for rank in data["layers_per_stage"]),
            mtp_apart=bool(data.get("mtp_apart", False)),
        )

    def layers_text(self, schedule: str = "1f1b") -> str:
        """``15|16*6|15``: layers per chunk in the model order of a schedule, repeats folded."""
        return fold_layers(self.layers_per_stage, schedule)
