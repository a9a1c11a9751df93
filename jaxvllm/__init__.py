"""jaxvllm: paged LLM inference in JAX, decided exactly as NanoVLLM decides it."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxvllm.llm import LLM
    from jaxvllm.outputs import RequestOutput
    from jaxvllm.sampling_params import SamplingParams

__all__ = ["LLM", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "jaxvllm.llm",
    "RequestOutput": "jaxvllm.outputs",
    "SamplingParams": "jaxvllm.sampling_params",
}


def __getattr__(name: str):
    # Lazy, so that the metadata layer can be imported (and tested) without importing jax.
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxvllm' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
