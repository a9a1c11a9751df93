"""The decoder that all architectures share: embedding, layers, head. A `Style` holds what their configs leave out."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxvllm.kernels.paged_attention import AttentionBatch
from jaxvllm.models.config import ModelConfig
from jaxvllm.models.experts import SparseMLP
from jaxvllm.models.layers import MLP, Attention, Embedding, Linear, RMSNorm, Style, linear
from jaxvllm.models.rope import Angles, RopeConfig, rotary_angles


class DecoderLayer(nnx.Module):
    """Attention, then feed-forward, each with the norms of the style around it, added to what came in."""

    def __init__(self, config: ModelConfig, layer: int, style: Style):
        norm = partial(
            RMSNorm, config.hidden_size, eps=config.rms_norm_eps, dtype=config.dtype, offset=style.norm_offset
        )
        self.attention_norm = norm() if style.input_norms else None
        self.attention = Attention(config, layer, style)
        self.attention_output_norm = norm() if style.output_norms else None
        self.mlp_norm = norm() if style.input_norms else None
        sparse = config.sparse_layers[layer]
        self.mlp = None if sparse else MLP(config)
        self.experts = SparseMLP(config, style) if sparse else None
        self.mlp_output_norm = norm() if style.output_norms else None

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
        with jax.named_scope("attention"):
            y = _normed(self.attention_norm, x)
            y, pool = self.attention(y, angles, pool, batch, backend=backend, decode_only=decode_only)
            x = x + _normed(self.attention_output_norm, y)
        with jax.named_scope("mlp"):
            y = _normed(self.mlp_norm, x)
            if self.mlp is not None:
                y = self.mlp(y)
            if self.experts is not None:
                y = self.experts(y, batch.cu_seqlens_q[-1])
            return x + _normed(self.mlp_output_norm, y), pool


def _normed(norm: RMSNorm | None, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    return x if norm is None else norm(x)


@partial(jax.jit, static_argnames=("backend", "decode_only"))
def _run_layer(layer, x, angles, pool, batch, *, backend, decode_only):
    # Jitted inside the step's own jit, so that the body is traced and lowered once per program and kind of layer.
    return layer(x, angles, pool, batch, backend=backend, decode_only=decode_only)


class Decoder(nnx.Module):
    """Token ids to hidden states to logits."""

    def __init__(self, config: ModelConfig, style: Style):
        D, V, dtype = config.hidden_size, config.vocab_size, config.dtype
        self.config = config
        self.style = style
        self.max_len = config.max_position_embeddings  # tokens of the longest sequence served; an engine lowers it
        self.embed = Embedding(V, D, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(config, i, style) for i in range(config.num_layers)])
        self.norm = RMSNorm(D, eps=config.rms_norm_eps, dtype=dtype, offset=style.norm_offset)
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
        if self.style.scaled_embedding:
            x = x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)  # rounded first, as the models were trained
        angles = self._angles(positions)
        pools = []
        for layer, rope, pool in zip(self.layers, self.config.ropes, kv_cache, strict=True):
            x, pool = _run_layer(layer, x, angles[rope], pool, batch, backend=backend, decode_only=decode_only)
            pools.append(pool)
        return self.norm(x), pools

    def logits(self, hidden: Float[Array, "S D"]) -> Float32[Array, "S V"]:
        """Returns the scores of the next token, in float32."""
        weight = self.embed.weight if self.head is None else self.head.weight
        logits = linear(hidden, weight[...], out_dtype=jnp.float32)
        cap = self.config.logits_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _angles(self, positions: Int32[Array, " T"]) -> dict[RopeConfig | None, Angles | None]:
        """Returns the angles of each kind of layer, computed once per step."""
        head_dim = self.config.head_dim
        return {
            rope: None if rope is None else rotary_angles(positions, rope, head_dim, self.max_len)
            for rope in dict.fromkeys(self.config.ropes)
        }
