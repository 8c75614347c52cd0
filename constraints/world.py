"""The two grids over the GPUs: dense ranks tp*cp*pp*dp, expert ranks etp*ep*pp*edp."""

from __future__ import annotations

from typing import Any

from parsolve.functions import rule
from parsolve.problem import Instance


@rule(
    "tp*cp*pp*dp = {tp}*{cp}*{pp}*{dp} is not the world of {p.world} GPUs",
    role="grid",
    source="Megatron-LM arguments.py: world % (tp*pp*cp) == 0",
)
def world_size(p: Instance, *, tp: Any, cp: Any, pp: Any, dp: Any) -> Any:
    """The dense grid uses every GPU: tp*cp*pp*dp = world."""
    return tp * cp * pp * dp == p.world


@rule(
    "etp*ep*pp*edp = {etp}*{ep}*{pp}*{edp} is not the world of {p.world} GPUs: "
    "etp*ep must divide tp*cp*dp (etp is tp unless given)",
    role="grid",
    source="Megatron-LM parallel_state.py: world % (etp*ep*pp) == 0",
)
def expert_world_size(p: Instance, *, etp: Any, ep: Any, pp: Any, edp: Any) -> Any:
    """The expert grid uses every GPU: etp*ep*pp*edp = world."""
    return etp * ep * pp * edp == p.world


@rule("shards = {shards} is not dp*cp = {dp}*{cp}", role="grid")
def optimizer_shards(p: Instance, *, cp: Any, dp: Any, shards: Any) -> Any:
    """Dense optimizer states are shared by the dp*cp ranks that hold the same weights."""
    return shards == dp * cp


RULES = (world_size, expert_world_size, optimizer_shards)
