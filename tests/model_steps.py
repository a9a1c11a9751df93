"""Runs a model without an engine: hand-made batches over a cache that starts full of NaN."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxvllm.kernels import kv_cache
from jaxvllm.kernels.paged_attention import AttentionBatch
from jaxvllm.models.decoder import Decoder

BLOCK_SIZE = 16
_MULTIPLE = 128  # tokens are padded to it: few programs, and every test sees padding


class Runner:
    """Keeps the K and V of some sequences; each `step` appends tokens to them."""

    def __init__(self, model: Decoder, num_seqs: int, max_len: int):
        config = model.config
        self._graphdef, self._weights = nnx.split(model)
        self._lens = [0] * num_seqs
        blocks_per_seq = -(-max_len // BLOCK_SIZE)
        num_blocks = num_seqs * blocks_per_seq
        # Blocks in an order of their own, so that a table read wrongly shows.
        order = np.random.RandomState(5).permutation(num_blocks).astype(np.int32)
        self.tables = order.reshape(num_seqs, blocks_per_seq)
        shape = kv_cache.pool_shape(num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim, "xla")
        self.pools = [jnp.asarray(np.full(shape, np.nan, jnp.dtype(config.dtype))) for _ in range(config.num_layers)]

    def step(self, new_tokens: list[list[int]], *, decode_only: bool = False) -> list[np.ndarray]:
        """Appends each sequence's new tokens; returns their logits, float32 [n, V] per sequence."""
        arguments = self._arguments(new_tokens, decode_only)
        logits, self.pools = _step(*arguments, decode_only=decode_only)
        counts = [len(tokens) for tokens in new_tokens]
        self._lens = [length + count for length, count in zip(self._lens, counts, strict=True)]
        return np.split(np.asarray(logits)[: sum(counts)], np.cumsum(counts)[:-1])

    def compiled(self, new_tokens: list[list[int]], *, decode_only: bool = False) -> jax.stages.Compiled:
        """Returns the program that `step` would run."""
        return _step.lower(*self._arguments(new_tokens, decode_only), decode_only=decode_only).compile()

    def _arguments(self, new_tokens: list[list[int]], decode_only: bool) -> tuple:
        ids, positions, slots = [], [], []
        for table, length, tokens in zip(self.tables, self._lens, new_tokens, strict=True):
            at = np.arange(length, length + len(tokens))
            ids += tokens
            positions += at.tolist()
            slots += (table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE).tolist()
        counts = [len(tokens) for tokens in new_tokens]
        num_tokens = len(ids) if decode_only else -(-(len(ids) + 1) // _MULTIPLE) * _MULTIPLE
        batch = AttentionBatch(
            slot_mapping=_padded(slots, num_tokens, self.tables.size * BLOCK_SIZE),
            block_tables=jnp.asarray(self.tables),
            context_lens=_int32(np.add(self._lens, counts)),
            cu_seqlens_q=_int32(np.cumsum([0, *counts])),
            num_seqs=_int32([len(new_tokens)]),
        )
        ids, positions = _padded(ids, num_tokens, 0), _padded(positions, num_tokens, 0)
        return self._graphdef, self._weights, ids, positions, self.pools, batch


def prefill(model: Decoder, sequences: list[list[int]]) -> list[np.ndarray]:
    """Runs whole sequences in one batch; returns the logits of every token, float32 [n, V] per sequence."""
    return Runner(model, len(sequences), max(map(len, sequences))).step(sequences)


def assert_equals_transformers(model: Decoder, expected: dict):
    """Checks a model's greedy tokens and logits against a recorded case, by one prefill of prompt and tokens."""
    prompts = expected["prompts"]
    all_logits = prefill(model, [p["prompt_token_ids"] + p["token_ids"] for p in prompts])
    for prompt, logits in zip(prompts, all_logits, strict=True):
        chosen_from = logits[len(prompt["prompt_token_ids"]) - 1 : -1]
        assert chosen_from.argmax(axis=-1).tolist() == prompt["token_ids"]
        at_steps = chosen_from[expected["logit_steps"]]
        np.testing.assert_allclose(at_steps[:, expected["logit_token_ids"]], prompt["logits"], rtol=0, atol=1e-3)
        np.testing.assert_allclose(at_steps.max(axis=-1), prompt["max_logits"], rtol=0, atol=1e-3)


@partial(jax.jit, static_argnames=("graphdef", "decode_only"), donate_argnames="pools")
def _step(graphdef, weights, token_ids, positions, pools, batch, *, decode_only):
    model = nnx.merge(graphdef, weights)
    hidden, pools = model(token_ids, positions, pools, batch, backend="xla", decode_only=decode_only)
    return model.logits(hidden), pools


def _padded(values: list[int], length: int, padding: int) -> jax.Array:
    return _int32(values + [padding] * (length - len(values)))


def _int32(values) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.int32))  # converted by numpy, which compiles nothing
