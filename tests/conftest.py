"""Shapes and dtypes in signatures are checked while testing; one compilation cache serves the whole run."""

import os

from jaxtyping import install_import_hook

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Before any module of the engine is imported. The metadata layer has no jaxtyping annotations and stays free of jax.
install_import_hook(
    ["jaxvllm.kernels", "jaxvllm.models", "jaxvllm.engine.batch", "jaxvllm.engine.model_runner"], "beartype.beartype"
)
