"""Multi-token prediction: what a module has beside its layer and another pass through the model's own output layer.

A module normalises the hidden state and the embedding of a token further on, projects the two to the hidden size,
passes a layer of the kind of the model's last one and a norm, and predicts with the model's output layer: another
product with the vocabulary and another loss. Layer, look-up and output layer are the terms of the model itself.
Source: DeepSeek-AI 2024 (DeepSeek-V3), section 2.2; Megatron-Core multi_token_prediction.py, gpt_model.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parsolve.functions import term
from parsolve.objectives.compute import norm_traffic, passes, token_share, tokens
from parsolve.objectives.roofline import matmul_time, streaming_time
from parsolve.objectives.tensor_comm import activation_pass
from parsolve.problem import Instance
from parsolve.specs import Recompute

SOURCE = "Megatron-Core multi_token_prediction.py"


@term(label="mtp", source=SOURCE)
def mtp_projection(p: Instance, *, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    """Norms, concatenation and projection 2h -> h/tp of one module and microbatch, forward and backward, s.

    Whole-layer recomputation repeats all of it but the final norm. Norms move 4 bytes an element each (36 unfused), the
    concatenation reads and writes twice the hidden size: 8, times the profile's elementwise_traffic.
    """
    h, rows = p.model.hidden_size, tokens(p, cp, mbs)
    norm = norm_traffic(p)
    wise = rows * token_share(p, tp) * h
    ahead = matmul_time(p, rows, h / tp, 2.0 * h)
    ahead = ahead + streaming_time(p, wise * (2.0 * norm + 8.0 * p.profile.elementwise_traffic), 3)
    return ahead * passes(p, recompute) + 3.0 * streaming_time(p, wise * norm)


@term(label="mtp", source=SOURCE)
def mtp_tensor_comm(p: Instance, *, tp: Any, cp: Any, mbs: Any, recompute: Any) -> Any:
    """Exposed tensor-parallel traffic of the projection of one module and microbatch, s.

    Its output is gathered. With sequence parallelism its input (twice the hidden size) is gathered forward and reduced
    and scattered backward, and the gradient of its output is gathered: 3 passes of tokens*hidden each way. Without, the
    gradient of its input is all-reduced: 1 forward, 4 backward. Recomputation repeats the forward's.
    """
    forward, backward = (3.0, 3.0) if p.sequence_parallel else (1.0, 4.0)
    return activation_pass(p, tp, cp, mbs) * (forward * (1.0 + (recompute == Recompute.FULL)) + backward)


def kept_bytes(p: Instance, tp: Any, cp: Any, mbs: Any, recompute: Any, norm: float) -> Any:
    """What a module keeps for its backward pass beside its layer, bytes; ``norm`` a norm's bytes per element.

    The inputs of two norms and their concatenated outputs, and the final norm's input and output; recomputed, the two
    inputs instead of the first four.
    """
    held = norm + np.where(recompute == Recompute.FULL, 4.0, 2.0 * norm)
    return tokens(p, cp, mbs) * token_share(p, tp) * p.model.hidden_size * held
