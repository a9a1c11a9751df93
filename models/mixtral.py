"""Mixtral."""

from jaxvllm.models import llama
from jaxvllm.models.decoder import Decoder

WEIGHTS = llama.WEIGHTS | {  # Hugging Face's name: our path; the first * is the layer's number, the second the expert's
    "model.layers.*.block_sparse_moe.gate.weight": "layers.*.experts.router.weight",
    "model.layers.*.block_sparse_moe.experts.*.w1.weight": "layers.*.experts.gate.weight",
    "model.layers.*.block_sparse_moe.experts.*.w3.weight": "layers.*.experts.up.weight",
    "model.layers.*.block_sparse_moe.experts.*.w2.weight": "layers.*.experts.down.weight",
}


class Mixtral(Decoder):
    """Mistral's attention; every layer is a mixture, a token's expert weights sum to 1."""
