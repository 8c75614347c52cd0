"""The shape of a decoder-only transformer, and its parameter counts, counted matrix by matrix."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, model_validator

from parsolve.specs.base import Count, Spec


class MoE(Spec):
    """Mixture of experts. ``dense_layers`` lists the layers (from 0) that have a plain MLP instead of experts.

    ``shared_ffn_size`` is the total width of the shared experts (0: none); ``shared_gate`` adds the Qwen2-MoE gate
    vector. ``expert_bias`` is a bias vector on every expert matrix (gpt-oss); ``router_bias`` a learned bias of the
    router. ``score_correction_bias`` is DeepSeek-V3's balancing bias: a buffer, not counted as parameters unless
    ``score_correction_params`` (Ernie 4.5 stores it as one).
    """

    num_experts: Count
    top_k: Count
    ffn_size: Count
    shared_ffn_size: int = Field(default=0, ge=0)
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    expert_bias: bool = False
    router_bias: bool = False
    score_correction_bias: bool = False
    score_correction_params: bool = False
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int | None = Field(default=None, gt=0, description="router groups for node-limited routing")
    group_top_k: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> MoE:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} exceeds num_experts {self.num_experts}")
        if (self.num_groups is None) != (self.group_top_k is None):
            raise ValueError("num_groups and group_top_k belong together")
        if self.num_groups and self.num_experts % self.num_groups:
            raise ValueError(f"num_groups {self.num_groups} does not divide num_experts {self.num_experts}")
        return self


class MLA(Spec):
    """Multi-head latent attention (DeepSeek-V2): low-rank queries (None: full) and keys/values, split head sizes."""

    q_lora_rank: int | None = Field(default=None, gt=0)
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count


class Model(Spec):
    """A decoder-only transformer.

    ``ffn_size`` is the MLP width of dense layers. ``head_dim`` may differ from hidden/heads. ``mtp_layers`` are
    multi-token-prediction modules, kept apart from ``num_layers`` and from ``num_params``: each has a layer of the kind
    of the last one. ``norms_per_layer``, ``norm_bias``, ``qk_norm``, the bias switches and ``extra_layer_params``
    (small ones of every layer that nothing else counts, such as those of an activation) make the count exact.
    ``max_positions`` is the table size of learned positions. ``embedding_size`` is the width of the vocabulary matrices
    where it is not the hidden size: one matrix then leads from it to the layers and one back. ``window`` is the
    sliding-window length of the layers in ``window_layers``.
    """

    name: str
    num_layers: Annotated[Count, Field(le=10_000)]
    hidden_size: Count
    ffn_size: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count = Field(description="usually hidden_size / num_heads")
    vocab_size: Count
    embedding_size: Count | None = None
    gated_mlp: bool = True
    activation: Literal["silu", "gelu", "relu", "relu2"] = "silu"
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norms_per_layer: int = Field(default=2, ge=0)
    final_norm: bool = True
    embedding_norm: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    qkv_bias: bool = False
    attention_out_bias: bool = False
    attention_sinks: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    extra_layer_params: int = Field(default=0, ge=0)
    tied_embeddings: bool = False
    position: Literal["rope", "learned", "alibi", "none"] = "rope"
    max_positions: Count | None = None
    rope_base: float = Field(default=10000.0, gt=0)
    rope_fraction: float = Field(default=1.0, gt=0, le=1)
    window: Count | None = None
    window_layers: tuple[int, ...] = ()
    moe: MoE | None = None
    mla: MLA | None = None
    mtp_layers: int = Field(default=0, ge=0)
    sources: dict[str, str] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Model:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        if self.moe:
            bad = [i for i in self.moe.dense_layers if not 0 <= i < self.num_layers]
            if bad:
                raise ValueError(f"moe.dense_layers names layer {bad[0]}, but layers are 0 to {self.num_layers - 1}")
            if len(set(self.moe.dense_layers)) != len(self.moe.dense_layers):
                raise ValueError("moe.dense_layers names a layer twice")
            if len(self.moe.dense_layers) == self.num_layers:
                raise ValueError("moe.dense_layers names every layer: leave out moe for a dense model")
        if self.position == "learned" and self.max_positions is None:
            raise ValueError("learned positions need max_positions")
        if bool(self.window_layers) != (self.window is not None):
            raise ValueError("window and window_layers belong together")
        bad = [i for i in self.window_layers if not 0 <= i < self.num_layers]
        if bad:
            raise ValueError(f"window_layers names layer {bad[0]}, but layers are 0 to {self.num_layers - 1}")
        return self

    # ---- shapes ----------------------------------------------------------------------------------------------
    @cached_property
    def layer_is_moe(self) -> tuple[bool, ...]:
        """One flag a layer: True where the MLP is a mixture of experts."""
        if self.moe is None:
            return (False,) * self.num_layers
        dense = set(self.moe.dense_layers)
        return tuple(i not in dense for i in range(self.num_layers))

    @cached_property
    def num_moe_layers(self) -> int:
        return sum(self.layer_is_moe)

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers - self.num_moe_layers

    @property
    def qk_head_size(self) -> int:
        """Width of a query or key head in the attention product."""
        return self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def v_head_size(self) -> int:
        """Width of a value head."""
        return self.mla.v_head_dim if self.mla else self.head_dim

    # ---- parameters ------------------------------------------------------------------------------------------
    @property
    def norm_params(self) -> int:
        """Parameters of one norm over the hidden size."""
        return self.hidden_size * (2 if self.norm_bias else 1)

    @property
    def attention_matrix_params(self) -> int:
        """Weights of one layer's attention projections (matrices only)."""
        h, a = self.hidden_size, self.num_heads
        if self.mla is None:
            return h * self.head_dim * (2 * a + 2 * self.num_kv_heads)
        m = self.mla
        q = h * a * self.qk_head_size
        if m.q_lora_rank:
            q = h * m.q_lora_rank + m.q_lora_rank * a * self.qk_head_size
        down = h * (m.kv_lora_rank + m.qk_rope_head_dim)
        up = m.kv_lora_rank * a * (m.qk_nope_head_dim + m.v_head_dim)
        return q + down + up + a * m.v_head_dim * h

    @property
    def attention_vector_params(self) -> int:
        """Biases, per-head norms, latent norms and sinks of one layer's attention."""
        a, g, k = self.num_heads, self.num_kv_heads, self.head_dim
        count = 0
        if self.mla is None:
            if self.qkv_bias:
                count += (a + 2 * g) * k
            if self.qk_norm == "head":
                count += 2 * k
            elif self.qk_norm == "full":
                count += (a + g) * k
        else:
            count += (self.mla.q_lora_rank or 0) + self.mla.kv_lora_rank
            if self.qkv_bias:
                count += (self.mla.q_lora_rank or 0) + self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
        if self.attention_out_bias:
            count += self.hidden_size
        if self.attention_sinks:
            count += a
        return count

    def mlp_matrix_params(self, width: int) -> int:
        """Matrices of an MLP of ``width`` (2 without, 3 with a gate)."""
        return self.hidden_size * width * (3 if self.gated_mlp else 2)

    def _mlp_bias_params(self, width: int) -> int:
        return width * (2 if self.gated_mlp else 1) + self.hidden_size

    @property
    def dense_mlp_params(self) -> int:
        """One dense layer's MLP, biases included."""
        return self.mlp_matrix_params(self.ffn_size) + (self._mlp_bias_params(self.ffn_size) if self.mlp_bias else 0)

    @property
    def expert_params(self) -> int:
        """One routed expert, biases included (0 for a dense model)."""
        if self.moe is None:
            return 0
        bias = self._mlp_bias_params(self.moe.ffn_size) if self.moe.expert_bias else 0
        return self.mlp_matrix_params(self.moe.ffn_size) + bias

    @property
    def router_params(self) -> int:
        """The router of one MoE layer."""
        if self.moe is None:
            return 0
        vectors = int(self.moe.router_bias) + int(self.moe.score_correction_params)
        return self.moe.num_experts * (self.hidden_size + vectors)

    @property
    def shared_expert_params(self) -> int:
        """The shared experts of one MoE layer with their gate."""
        if self.moe is None or not self.moe.shared_ffn_size:
            return 0
        gate = self.hidden_size if self.moe.shared_gate else 0
        return self.mlp_matrix_params(self.moe.shared_ffn_size) + gate

    @property
    def attention_params(self) -> int:
        """One layer's attention with biases, plus the layer's norms."""
        norms = self.norms_per_layer * self.norm_params + self.extra_layer_params
        return self.attention_matrix_params + self.attention_vector_params + norms

    @property
    def dense_layer_params(self) -> int:
        """A layer with a plain MLP."""
        return self.attention_params + self.dense_mlp_params

    @property
    def moe_layer_dense_params(self) -> int:
        """What an MoE layer holds outside its routed experts."""
        return self.attention_params + self.router_params + self.shared_expert_params

    @property
    def routed_params_per_layer(self) -> int:
        """All routed experts of one MoE layer."""
        return self.expert_params * (self.moe.num_experts if self.moe else 0)

    @property
    def mtp_own_params(self) -> int:
        """What a multi-token-prediction module has beside its layer: two norms, a projection 2h -> h, a final norm.

        Embedding and output layer are the model's. Source: DeepSeek-AI 2024, section 2.2.
        """
        return 2 * self.hidden_size**2 + 3 * self.norm_params

    @property
    def mtp_params(self) -> int:
        """All multi-token-prediction modules that the model has, without the embedding and output layer they share."""
        last = self.moe_layer_dense_params + self.routed_params_per_layer
        return self.mtp_layers * (self.mtp_own_params + (last if self.layer_is_moe[-1] else self.dense_layer_params))

    @property
    def embedding_params(self) -> int:
        """Token embedding, learned positions and embedding norm."""
        positions = (self.max_positions or 0) * self.hidden_size if self.position == "learned" else 0
        norm = self.norm_params if self.embedding_norm else 0
        return self.vocab_size * self.embedding_width + self.projection_params + positions + norm

    @property
    def embedding_width(self) -> int:
        """Columns of the vocabulary matrices."""
        return self.embedding_size or self.hidden_size

    @property
    def projection_params(self) -> int:
        """The matrix between an embedding of its own width and the layers (there is one on either end)."""
        return self.embedding_size * self.hidden_size if self.embedding_size else 0

    @property
    def head_params(self) -> int:
        """The output matrix (counted even when tied) and its bias."""
        return self.vocab_size * (self.embedding_width + int(self.head_bias)) + self.projection_params

    @property
    def num_params(self) -> int:
        """All parameters; tied weights once, multi-token-prediction modules not counted."""
        layers = self.num_dense_layers * self.dense_layer_params
        layers += self.num_moe_layers * (self.moe_layer_dense_params + self.routed_params_per_layer)
        head = self.head_params - (self.vocab_size * self.embedding_width if self.tied_embeddings else 0)
        return layers + self.embedding_params + head + (self.norm_params if self.final_norm else 0)

    @property
    def routed_expert_params(self) -> int:
        """Routed experts of all layers."""
        return self.num_moe_layers * self.routed_params_per_layer

    @property
    def num_active_params(self) -> int:
        """Parameters that one token passes: top-k experts instead of all."""
        if self.moe is None:
            return self.num_params
        idle = (self.moe.num_experts - self.moe.top_k) * self.expert_params
        return self.num_params - self.num_moe_layers * idle

    @property
    def embedding_and_head_params(self) -> int:
        """The vocabulary matrices (one when tied), without positions."""
        return self.vocab_size * self.embedding_width * (1 if self.tied_embeddings else 2)
