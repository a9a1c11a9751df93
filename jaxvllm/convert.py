"""Writes a model, from whatever format it has, as an Orbax checkpoint with its config and its tokenizer."""

import dataclasses
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxvllm.models.checkpoint.loader import load_model, open_checkpoint, resolve_path
from jaxvllm.models.checkpoint.orbax_folder import write_orbax
from jaxvllm.tokenizer import load_tokenizer


def convert(model: str, out: Path, *, dtype: str = "auto", quantization: str = "auto"):
    """Loads a model and writes it to the folder `out`, which appears once it is whole.

    `dtype` and `quantization` are those of `EngineConfig`. Raises ValueError where `out` exists or the model cannot be
    loaded. An interrupted conversion leaves at most a folder `<out>.unfinished-...`, which is refused as a model.
    """
    if os.path.lexists(out):
        raise ValueError(f"{out} exists: give the name of a folder that does not.")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out.absolute().parent} is no folder: make it first.")
    checkpoint = open_checkpoint(resolve_path(model))
    tokenizer = load_tokenizer(checkpoint)
    config, module = load_model(checkpoint, dtype, quantization=quantization)
    # A GGUF file has end ids that no tokenizer's files name: that of a turn, that of a message.
    config = dataclasses.replace(config, eos_token_ids=config.eos_token_ids | tokenizer.eos_token_ids)
    with _appears_whole(out) as folder:
        tokenizer.save(folder)
        write_orbax(folder, config, module)


@contextmanager
def _appears_whole(out: Path) -> Iterator[Path]:
    """Gives a folder beside `out` to write to, which takes its name at the end, or goes when something fails."""
    folder = out.absolute().with_name(f"{out.name}.unfinished-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    try:
        yield folder
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
