"""Tensor-parallel communication: activations all-reduced twice per layer and direction."""

from __future__ import annotations

from typing import Any

from parsolve.functions import term
from parsolve.objectives.compute import tokens
from parsolve.objectives.network import pass_time
from parsolve.objectives.parameters import padded_vocab
from parsolve.problem import Instance
from parsolve.specs import Recompute


def activation_pass(p: Instance, tp: Any, cp: Any, mbs: Any) -> Any:
    """One all-gather or reduce-scatter of a microbatch's activations (tokens x hidden, 2 bytes) over tp, s."""
    shown = 1.0 - p.profile.tp_overlap * p.overlap
    return pass_time(p, tp, 1, 2.0 * tokens(p, cp, mbs) * p.model.hidden_size) * shown


@term(label="tp_comm", source="Shoeybi et al. 2019; Korthikanti et al. 2022")
def attention_tensor_comm(p: Instance, *, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    """Exposed tensor-parallel traffic of attention for one layer and microbatch, s.

    One all-reduce (= all-gather + reduce-scatter with sequence parallelism, same bytes) forward and one backward;
    whole-layer recomputation repeats the forward's.
    """
    return activation_pass(p, tp, cp, mbs) * (4.0 + 2.0 * (recompute == Recompute.FULL))


@term(label="tp_comm", source="Shoeybi et al. 2019; Korthikanti et al. 2022")
def mlp_tensor_comm(p: Instance, *, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    """Exposed tensor-parallel traffic of a dense MLP (or of shared experts), as for attention, s."""
    return activation_pass(p, tp, cp, mbs) * (4.0 + 2.0 * (recompute == Recompute.FULL))


@term(label="tp_comm", source="vocabulary-parallel embedding and logits, Shoeybi et al. 2019")
def embedding_tensor_comm(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """All-reduce after the embedding (forward) and its mirror (backward), s a microbatch."""
    return 2.0 * activation_pass(p, tp, cp, mbs)


@term(label="tp_comm", source="vocabulary-parallel embedding and logits, Shoeybi et al. 2019")
def head_tensor_comm(p: Instance, *, tp: Any, cp: Any, mbs: Any) -> Any:
    """Gather before the logits and its mirror in the backward pass, s a microbatch.

    Where the loss is not parallel the logits of the whole vocabulary are gathered as well.
    """
    ends = 2.0 * activation_pass(p, tp, cp, mbs)
    if p.parallel_loss:
        return ends
    return ends + pass_time(p, tp, 1, 2.0 * tokens(p, cp, mbs) * padded_vocab(p, tp))
