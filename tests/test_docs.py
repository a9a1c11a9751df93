"""The documentation agrees with the product. `make docs` builds the site; here only texts are compared."""

import ast
import json
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
from engines import make_llm

import jaxvllm
from tools.docs import option_tables

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


@dataclass
class Uncommented:
    said: int = 0  # with a comment
    silent: int = 0


def found(path: str) -> bool:
    """Whether a dotted path names a module or something in one."""
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        try:
            owner = import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for name in parts[i:]:
            owner = getattr(owner, name, None)
        return owner is not None
    return False


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert sorted(re.findall(r"\w+\.md", nav)) == [page.name for page in PAGES]


def test_the_api_reference_names_what_exists():
    paths = re.findall(r"^::: (.+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    assert paths
    assert [path for path in paths if not found(path)] == []


def named_code(page: str) -> list[str]:
    """The dotted paths of what a page names in rows `| file | function, function | ... |`."""
    paths = []
    for file, names in re.findall(r"^\| `([\w/]+)\.py` \| ((?:`[\w.]+`(?:, )?)+) \|", page, re.MULTILINE):
        paths += [f"{file.replace('/', '.')}.{name}" for name in re.findall(r"`([\w.]+)`", names)]
    return paths


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/research.md", "CONTRIBUTING.md"])
def test_a_page_names_files_and_code_that_exist(page):
    text = (ROOT / page).read_text()
    files = set(re.findall(r"`((?:jaxvllm|kernels|models|tests|tools)/[\w/]*(?:\.py|/))`", text))
    assert files
    assert sorted(file for file in files if not (ROOT / file).exists()) == []
    assert [path for path in named_code(text) if not found(path)] == []
    modules = {
        "BlockManager": "block_manager",
        "Scheduler": "scheduler",
        "LLMEngine": "llm_engine",
        "StepLoop": "step_loop",
    }
    methods = [name for name in re.findall(r"`(\w+\.\w+)`", text) if name.partition(".")[0] in modules]
    assert [m for m in methods if not found(f"jaxvllm.engine.{modules[m.partition('.')[0]]}.{m}")] == []


def test_the_architecture_page_names_the_whole_path():
    assert len(named_code((ROOT / "docs/architecture.md").read_text())) > 50


def test_code_that_does_not_exist_is_noticed():
    page = "| `kernels/xla.py` | `attend`, `no_such_function` | ... |"
    assert [path for path in named_code(page) if not found(path)] == ["kernels.xla.no_such_function"]


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("*.md")], ids=lambda page: page.name)
def test_links_lead_to_files_of_the_repository(page):
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize(("page", "cls"), option_tables.PAGES.items())
def test_the_tables_of_options_are_up_to_date(page, cls):
    text = (ROOT / "docs" / page).read_text()
    assert text == option_tables.updated(text, cls), "run `python -m tools.docs.option_tables`"


def test_a_field_without_a_comment_is_named():
    with pytest.raises(ValueError, match="add a comment at the end of silent"):
        option_tables.field_comments(Uncommented)


@pytest.mark.parametrize("file", sorted((ROOT / "docs/benchmarks/kernels").glob("*.json")), ids=lambda file: file.stem)
def test_a_table_of_numbers_says_where_they_come_from(file):
    content = json.loads(file.read_text())
    assert content["rows"]
    assert {"what", "command", "hardware", "software", "commit", "date"} <= {key for key in content if content[key]}
    assert f"`{file.name}`" in (ROOT / "docs/kernels.md").read_text()


def test_the_readme_s_example_runs(tiny_llama_path, monkeypatch, capsys):
    """On a tiny model, in place of the hub's."""
    engines = []

    def small_llm(model, **options):
        engines.append((model, make_llm(tiny_llama_path, **options)))
        return engines[-1][1]

    monkeypatch.setattr(jaxvllm, "LLM", small_llm)
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    [(model, llm)] = engines
    assert model == "Qwen/Qwen3-0.6B"
    assert llm.stats.num_generated_tokens > 0
    assert capsys.readouterr().out.strip()
    assert llm.is_finished()


PROVENANCE = re.compile(r"\b[0-9a-f]{7}\b")


def test_every_measured_figure_of_the_readme_names_a_commit_and_hardware():
    section = (ROOT / "README.md").read_text().partition("## Measured")[2].partition("\n## ")[0]
    benchmarks, _, parity = section.partition("<!-- performance: end -->")
    rows = re.findall(r"^\| (?!measured|-)(.+)$", benchmarks, re.MULTILINE)
    assert rows
    for text in [*rows, parity]:
        assert PROVENANCE.search(text), text
        assert "EPYC" in text, text


def test_every_section_of_measured_tables_names_a_commit_and_hardware():
    page = (ROOT / "docs/performance.md").read_text()
    parts = re.split(r"^##+ ", page, flags=re.MULTILINE)
    sections = [part for part in parts if re.search(r"^\| .*measured|, ms \|", part, re.MULTILINE)]
    assert len(sections) == 3
    for text in sections:
        assert PROVENANCE.search(text), text
        assert "EPYC" in text, text


def product_texts() -> list[str]:
    """Every text in the product's source; a value put into one is a NUL."""
    texts = []
    for file in [*ROOT.glob("jaxvllm/**/*.py"), *ROOT.glob("kernels/**/*.py"), *ROOT.glob("models/**/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub("%[sd]", "\0", node.value))  # a line of the log
    return texts


def test_every_message_of_the_troubleshooting_page_exists():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    messages = [message for message in re.findall(r"^\| `([^|]+)` \|", page, re.MULTILINE) if " " in message]
    assert len(messages) > 30
    texts = product_texts()
    patterns = {m: re.compile(".*".join(map(re.escape, m.split("...")))) for m in messages}
    assert [m for m, pattern in patterns.items() if not any(map(pattern.search, texts))] == []
