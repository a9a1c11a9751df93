"""The layers that architectures share. Weights are [out, in], as Hugging Face stores them."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxvllm.kernels import paged_attention
from jaxvllm.kernels.matmul import int8_matmul, matmul
from jaxvllm.kernels.paged_attention import AttentionBatch
from jaxvllm.models.config import ModelConfig
from jaxvllm.models.quantized import QuantizedWeight
from jaxvllm.models.rope import Angles, rotate

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True)}


def linear(
    x: Float[Array, "rows inputs"],
    weight: Float[Array, "outputs inputs"] | QuantizedWeight,
    bias: Float[Array, " outputs"] | None = None,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "rows outputs"]:
    """Returns x @ weight.T + bias, summed in float32; `out_dtype` defaults to x's dtype."""
    if isinstance(weight, QuantizedWeight):
        y = int8_matmul(x, weight.values, weight.scales, out_dtype=out_dtype)
    else:
        y = matmul(x, weight, out_dtype=out_dtype)
    return y if bias is None else y + bias


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """How an architecture's layers differ from Llama's where its config does not say so. None: as the config says."""

    input_norms: bool = True  # before attention and before the feed-forward layer
    output_norms: bool = False  # after each of them, before the sum
    norm_offset: float = 0.0  # a norm multiplies by its weight plus this
    qk_norm: Literal["head", "all"] | None = None  # q and k are normed: each head by itself, or all heads as one
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    scaled_embedding: bool = False  # by the root of the hidden size
    shared_expert_gate: bool = False  # what every token's expert adds is weighed by a sigmoid of its own


class Linear(nnx.Module):
    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: str):
        self.weight = nnx.Param(jnp.zeros((outputs, inputs), dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "T inputs"]) -> Float[Array, "T outputs"]:
        return linear(x, self.weight[...], None if self.bias is None else self.bias[...])


class RMSNorm(nnx.Module):
    """Divides by the root of the mean square over the last axis; float32 inside."""

    def __init__(self, size: int, *, eps: float, dtype: str, offset: float = 0.0):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale * (self.weight[...].astype(jnp.float32) + self.offset)).astype(x.dtype)


class Embedding(nnx.Module):
    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: str):
        self.weight = nnx.Param(jnp.zeros((vocab_size, hidden_size), dtype))

    def __call__(self, token_ids: Int32[Array, " T"]) -> Float[Array, "T D"]:
        # Ids are checked before they get here; clipping spares the mask that "fill" would compute.
        return jnp.take(self.weight[...], token_ids, axis=0, mode="clip")


class Attention(nnx.Module):
    """Grouped-query attention over the paged cache; rotary positions, window and norms on q and k where asked for."""

    def __init__(self, config: ModelConfig, layer: int, style: Style):
        D, H, N, K = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
        qkv_bias = config.attention_bias if style.qkv_bias is None else style.qkv_bias
        o_bias = config.attention_bias if style.o_bias is None else style.o_bias
        self.q = Linear(D, N * H, bias=qkv_bias, dtype=config.dtype)
        self.k = Linear(D, K * H, bias=qkv_bias, dtype=config.dtype)
        self.v = Linear(D, K * H, bias=qkv_bias, dtype=config.dtype)
        self.o = Linear(N * H, D, bias=o_bias, dtype=config.dtype)
        norm = partial(RMSNorm, eps=config.rms_norm_eps, dtype=config.dtype, offset=style.norm_offset)
        self.qk_norm = style.qk_norm
        self.q_norm = norm(H if style.qk_norm == "head" else N * H) if style.qk_norm else None
        self.k_norm = norm(H if style.qk_norm == "head" else K * H) if style.qk_norm else None
        self.head_dim = H
        self.scale = config.attention_scale
        self.soft_cap = config.attention_soft_cap
        self.sliding_window = config.sliding_windows[layer]

    def __call__(
        self,
        x: Float[Array, "T D"],
        angles: Angles | None,
        pool: Float[Array, "B K P two_Hp"],
        batch: AttentionBatch,
        *,
        backend: str,
        decode_only: bool,
    ) -> tuple[Float[Array, "T D"], Float[Array, "B K P two_Hp"]]:
        T, H = x.shape[0], self.head_dim
        q, k = self.q(x), self.k(x)
        v = self.v(x).reshape(T, -1, H)
        if self.qk_norm == "all":
            q, k = self._norm_qk(q, k)
        q, k = q.reshape(T, -1, H), k.reshape(T, -1, H)
        if self.qk_norm == "head":
            q, k = self._norm_qk(q, k)
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        out, pool = paged_attention.write_and_attend(
            q,
            k,
            v,
            pool,
            batch,
            scale=self.scale,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.soft_cap,
            decode_only=decode_only,
            backend=backend,
        )
        return self.o(out.reshape(T, -1)), pool

    def _norm_qk(self, q: Float[Array, "*q"], k: Float[Array, "*k"]) -> tuple[Float[Array, "*q"], Float[Array, "*k"]]:
        assert self.q_norm is not None
        assert self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)


class MLP(nnx.Module):
    """The gated feed-forward layer: down(act(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, intermediate_size: int | None = None):
        D, F = config.hidden_size, intermediate_size or config.intermediate_size
        make = partial(Linear, bias=config.mlp_bias, dtype=config.dtype)
        self.gate, self.up, self.down = make(D, F), make(D, F), make(F, D)
        self.hidden_act = config.hidden_act

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down(ACTIVATIONS[self.hidden_act](self.gate(x)) * self.up(x))
