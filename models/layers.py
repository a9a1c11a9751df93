"""The layers that architectures share. Weights are [out, in], as Hugging Face stores them."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxvllm.kernels import paged_attention
from jaxvllm.kernels.paged_attention import AttentionBatch
from jaxvllm.models.config import ModelConfig
from jaxvllm.models.quantized import QuantizedWeight, quantized_product
from jaxvllm.models.rope import rotary_angles, rotate

# Up to so many rows the CPU multiplies float32 two to three times faster with the weight on the left, where XLA's
# library reads it as it lies. Not so in bfloat16: there CPUs without matrix units fall into a plain loop.
_FEW_ROWS = 64


def linear(
    x: Float[Array, "rows inputs"],
    weight: Float[Array, "outputs inputs"] | QuantizedWeight,
    bias: Float[Array, " outputs"] | None = None,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "rows outputs"]:
    """Every product of activations and weights: x @ weight.T + bias, summed in float32, in x's dtype by default.

    float32 stays float32: the accelerators' default would round its inputs to bfloat16 or TF32.
    """
    product = partial(_product, out_dtype=jnp.dtype(out_dtype or x.dtype))
    if isinstance(weight, QuantizedWeight):
        y = quantized_product(x, weight).astype(out_dtype or x.dtype)
    elif x.dtype == jnp.float32 and x.shape[0] <= _FEW_ROWS:
        y = jax.lax.platform_dependent(x, weight, cpu=partial(product, weight_first=True), default=product)
    else:
        y = product(x, weight)
    return y if bias is None else y + bias


def _product(
    x: Float[Array, "rows inputs"],
    weight: Float[Array, "outputs inputs"],
    *,
    out_dtype: jnp.dtype,
    weight_first: bool = False,
) -> Float[Array, "rows outputs"]:
    left, right = (weight, x) if weight_first else (x, weight)
    y = jax.lax.dot_general(
        left,
        right,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype,
    )
    # Without the barrier XLA would put the operands back into one order, whichever was asked for.
    return jax.lax.optimization_barrier(y).T if weight_first else y


class Linear(nnx.Module):
    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: str):
        self.weight = nnx.Param(jnp.zeros((outputs, inputs), dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "T inputs"]) -> Float[Array, "T outputs"]:
        return linear(x, self.weight[...], None if self.bias is None else self.bias[...])


class RMSNorm(nnx.Module):
    """Divides by the root of the mean square over the last axis; float32 inside."""

    def __init__(self, size: int, *, eps: float, dtype: str):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale * self.weight[...]).astype(x.dtype)


class Embedding(nnx.Module):
    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: str):
        self.weight = nnx.Param(jnp.zeros((vocab_size, hidden_size), dtype))

    def __call__(self, token_ids: Int32[Array, " T"]) -> Float[Array, "T D"]:
        # Ids are checked before they get here; clipping spares the mask that "fill" would compute.
        return jnp.take(self.weight[...], token_ids, axis=0, mode="clip")


class Attention(nnx.Module):
    """Grouped-query attention over the paged cache, with rotary positions and, if asked, norms on q and k."""

    def __init__(self, config: ModelConfig, *, sliding_window: int | None, qk_norm: bool):
        D, H, dtype = config.hidden_size, config.head_dim, config.dtype
        make = partial(Linear, bias=config.attention_bias, dtype=dtype)
        self.q = make(D, config.num_heads * H)
        self.k = make(D, config.num_kv_heads * H)
        self.v = make(D, config.num_kv_heads * H)
        self.o = make(config.num_heads * H, D)
        self.q_norm = RMSNorm(H, eps=config.rms_norm_eps, dtype=dtype) if qk_norm else None
        self.k_norm = RMSNorm(H, eps=config.rms_norm_eps, dtype=dtype) if qk_norm else None
        self.head_dim = H
        self.sliding_window = sliding_window

    def __call__(
        self,
        x: Float[Array, "T D"],
        angles: tuple[Float32[Array, "T 1 half_H"], Float32[Array, "T 1 half_H"]],
        pool: Float[Array, "B K P two_Hp"],
        batch: AttentionBatch,
        *,
        backend: str,
        decode_only: bool,
    ) -> tuple[Float[Array, "T D"], Float[Array, "B K P two_Hp"]]:
        T, H = x.shape[0], self.head_dim
        q = self.q(x).reshape(T, -1, H)
        k = self.k(x).reshape(T, -1, H)
        v = self.v(x).reshape(T, -1, H)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *angles), rotate(k, *angles)
        pool = paged_attention.write(pool, k, v, batch.slot_mapping, backend=backend)
        out = paged_attention.attend(
            q,
            pool,
            batch.block_tables,
            batch.context_lens,
            batch.cu_seqlens_q,
            batch.num_seqs,
            scale=H**-0.5,
            sliding_window=self.sliding_window,
            decode_only=decode_only,
            backend=backend,
        )
        return self.o(out.reshape(T, -1)), pool


class MLP(nnx.Module):
    """The gated feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        D, F = config.hidden_size, config.intermediate_size
        make = partial(Linear, bias=config.mlp_bias, dtype=config.dtype)
        self.gate, self.up, self.down = make(D, F), make(D, F), make(F, D)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nnx.Module):
    """Attention, then feed-forward, each behind a norm and added to what came in."""

    def __init__(self, config: ModelConfig, *, sliding_window: int | None, qk_norm: bool):
        norm = partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps, dtype=config.dtype)
        self.attention_norm = norm()
        self.attention = Attention(config, sliding_window=sliding_window, qk_norm=qk_norm)
        self.mlp_norm = norm()
        self.mlp = MLP(config)

    def __call__(
        self,
        x: Float[Array, "T D"],
        angles: tuple[Float32[Array, "T 1 half_H"], Float32[Array, "T 1 half_H"]],
        pool: Float[Array, "B K P two_Hp"],
        batch: AttentionBatch,
        *,
        backend: str,
        decode_only: bool,
    ) -> tuple[Float[Array, "T D"], Float[Array, "B K P two_Hp"]]:
        with jax.named_scope("attention"):
            y, pool = self.attention(
                self.attention_norm(x), angles, pool, batch, backend=backend, decode_only=decode_only
            )
        x = x + y
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x)), pool


@partial(jax.jit, static_argnames=("backend", "decode_only"))
def _run_layer(layer, x, angles, pool, batch, *, backend, decode_only):
    # Jitted inside the step's own jit, so that the body is traced and lowered once per program and kind of layer.
    return layer(x, angles, pool, batch, backend=backend, decode_only=decode_only)


class Decoder(nnx.Module):
    """Token ids to hidden states to logits, through the decoder layers an architecture gives."""

    def __init__(self, config: ModelConfig, layers: list[DecoderLayer]):
        D, V, dtype = config.hidden_size, config.vocab_size, config.dtype
        self.config = config
        self.embed = Embedding(V, D, dtype=dtype)
        self.layers = nnx.List(layers)
        self.norm = RMSNorm(D, eps=config.rms_norm_eps, dtype=dtype)
        self.head = None if config.tie_word_embeddings else Linear(D, V, bias=False, dtype=dtype)

    def __call__(
        self,
        token_ids: Int32[Array, " T"],
        positions: Int32[Array, " T"],
        kv_cache: list[Float[Array, "B K P two_Hp"]],
        batch: AttentionBatch,
        *,
        backend: str,
        decode_only: bool,
    ) -> tuple[Float[Array, "T D"], list[Float[Array, "B K P two_Hp"]]]:
        """Runs one step: returns the hidden states after the final norm, and the cache with the step's K and V.

        `decode_only` promises one new token per sequence. Under a jit that donates `kv_cache` the pools are updated
        in place.
        """
        x = self.embed(token_ids)
        angles = rotary_angles(positions, self.config.rope, self.config.head_dim)
        pools = []
        for layer, pool in zip(self.layers, kv_cache, strict=True):
            x, pool = _run_layer(layer, x, angles, pool, batch, backend=backend, decode_only=decode_only)
            pools.append(pool)
        return self.norm(x), pools

    def logits(self, hidden: Float[Array, "S D"]) -> Float32[Array, "S V"]:
        """Returns the scores of the next token, in float32."""
        weight = self.embed.weight if self.head is None else self.head.weight
        return linear(hidden, weight[...], out_dtype=jnp.float32)
