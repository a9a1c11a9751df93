"""Shapes and dtypes in signatures are checked while testing; one compilation cache serves the whole run."""

import os
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# JAX's CPU threads, whatever the cores: the GPU interpreter needs one for each warpgroup that may wait for another
os.environ.setdefault("NPROC", "8")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "xla"))

# Before any module of the engine is imported. The metadata layer has no jaxtyping annotations and stays free of jax.
install_import_hook(
    [
        "jaxvllm.engine.batch",
        "jaxvllm.engine.model_runner",
        "jaxvllm.kernels",
        "jaxvllm.models.decoder",
        "jaxvllm.models.experts",
        "jaxvllm.models.layers",
        "jaxvllm.models.rope",
    ],
    "beartype.beartype",
)


@pytest.fixture(scope="session")
def tiny_llama_path(tmp_path_factory):
    """A folder with a tiny random Llama and its tokenizer, as Hugging Face lays it out."""
    from tiny_models import tiny_llama  # here: the tests of the metadata layer do not import jax

    return tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture
def tpu_interpreter(monkeypatch):
    """Runs the TPU's kernels in interpret mode, and knows the chips "tiny" and "tiny_two_cores"."""
    from tpu_cases import interpreted

    with interpreted(monkeypatch):
        yield
