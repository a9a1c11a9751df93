"""Imports point down: llm -> engine -> models -> kernels; and the metadata layer never meets jax."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGINE = "jaxvllm.engine"
FORBIDDEN = {  # folder: what nothing in it may import
    "kernels": ("jaxvllm.models", ENGINE, "jaxvllm.llm", "jaxvllm.cli"),
    "models": (ENGINE, "jaxvllm.llm", "jaxvllm.cli", "jaxvllm.tokenizer"),
    "jaxvllm/engine": ("jaxvllm.llm", "jaxvllm.cli", "jaxvllm.tokenizer"),
}
METADATA = ("sequence", "block_manager", "scheduler", "step", "step_loop", "batch")
TOP_LEVEL = ("kernels", "models", "configs")  # importable only behind jaxvllm


def imported(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import hides where it points"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_no_module_imports_from_above(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for file in files:
        above = {name for name in imported(file) for package in FORBIDDEN[folder] if within(name, package)}
        assert not above, f"{file.name} imports {above}"


@pytest.mark.parametrize("module", METADATA)
def test_the_metadata_layer_does_not_name_jax(module):
    names = imported(ROOT / "jaxvllm/engine" / f"{module}.py")
    assert not {name for name in names if within(name, "jax") or within(name, "flax")}


def test_linked_folders_are_imported_behind_jaxvllm_only():
    for file in [*ROOT.glob("jaxvllm/**/*.py"), *ROOT.glob("kernels/**/*.py"), *ROOT.glob("models/**/*.py")]:
        wrong = {name for name in imported(file) for package in TOP_LEVEL if within(name, package)}
        assert not wrong, f"{file} imports {wrong}"
