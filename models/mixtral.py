"""Mixtral: Llama with experts in every layer; the weights of a token's experts sum to 1."""

from jaxvllm.models import llama

WEIGHTS = llama.WEIGHTS | {  # Hugging Face's name: our path; the first * is the layer's number, the second the expert's
    "model.layers.*.block_sparse_moe.gate.weight": "layers.*.experts.router.weight",
    "model.layers.*.block_sparse_moe.experts.*.w1.weight": "layers.*.experts.gate.weight",
    "model.layers.*.block_sparse_moe.experts.*.w3.weight": "layers.*.experts.up.weight",
    "model.layers.*.block_sparse_moe.experts.*.w2.weight": "layers.*.experts.down.weight",
}
