import os
import signal
import subprocess
import sys
from typing import Any

import gguf_vocabularies as vocabularies
import pytest
from click.testing import CliRunner
from engines import GREEDY, make_llm
from gguf_files import write_gguf as write_model
from tiny_models import tiny_llama, tiny_qwen3

from jaxvllm import SamplingParams
from jaxvllm import convert as convert_module
from jaxvllm.cli import main
from jaxvllm.convert import convert
from jaxvllm.demo import demo_model_path
from jaxvllm.models.checkpoint.loader import load_model, read_config
from jaxvllm.tokenizer import load_tokenizer

TEXTS = ["", "the thing and 1984", "  two  spaces\n\n\tÀÉ 你好 👍🏽", "<|im_start|>user\nthe<|im_end|>", "we're 's"]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the thing"}]


def assert_same_tokenizer(one, other):
    for text in TEXTS:
        ids = one.encode(text)
        assert other.encode(text) == ids, text
        assert other.decode(ids) == one.decode(ids)
        assert other.decode(ids, skip_special_tokens=False) == one.decode(ids, skip_special_tokens=False)
    assert other.vocab_size == one.vocab_size
    assert [other.piece(i) for i in range(one.vocab_size)] == [one.piece(i) for i in range(one.vocab_size)]


def tokens_of(llm, prompts, num_tokens):
    params = SamplingParams(**GREEDY, max_tokens=num_tokens)
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_converted_folder_gives_the_same_tokens(make, tmp_path):
    source = make(tmp_path / "source")
    convert(str(source), tmp_path / "out")
    one, other = make_llm(source), make_llm(tmp_path / "out")
    prompts = ["the thing", [7, 8, 9] * 20]
    assert tokens_of(one, prompts, 12) == tokens_of(other, prompts, 12)
    assert other.config.eos == one.config.eos
    assert_same_tokenizer(one.tokenizer, other.tokenizer)
    assert other.tokenizer.apply_chat_template(MESSAGES) == one.tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize("begins", [True, False])
def test_tokenizer_of_a_gguf_file_survives_being_saved(begins, tmp_path):
    fields = vocabularies.byte_level_vocabulary() | {"add_bos_token": begins, "eot_token_id": 0}
    one = load_tokenizer(vocabularies.write_gguf(tmp_path / "m.gguf", **fields))
    (tmp_path / "out").mkdir()
    one.save(tmp_path / "out")
    other = load_tokenizer(tmp_path / "out")
    assert_same_tokenizer(one, other)
    assert other.apply_chat_template(MESSAGES) == one.apply_chat_template(MESSAGES)


def test_end_ids_of_a_gguf_file_are_kept(tmp_path, monkeypatch):
    """The file's own: of a text (258) and, known to its tokenizer only, of a turn."""
    write_model(tmp_path / "m.gguf")
    fields: dict[str, Any] = vocabularies.byte_level_vocabulary() | {"eos_token_id": 2, "eot_token_id": 0}
    tokenizer = load_tokenizer(vocabularies.write_gguf(tmp_path / "vocabulary.gguf", **fields))
    monkeypatch.setattr(convert_module, "load_tokenizer", lambda _: tokenizer)
    convert(str(tmp_path / "m.gguf"), tmp_path / "out")
    assert read_config(tmp_path / "out").eos_token_ids == {258, 2, 0}


def test_command_writes_int8(tmp_path):
    source, out = tiny_llama(tmp_path / "source"), tmp_path / "out"
    result = CliRunner().invoke(main, ["convert", str(source), str(out), "--quantization", "int8"])
    assert (result.exit_code, result.stdout) == (0, f"Wrote {out}\n")
    prompts = ["the thing", [7, 8, 9] * 20]
    assert tokens_of(make_llm(out), prompts, 12) == tokens_of(make_llm(source, quantization="int8"), prompts, 12)


@pytest.mark.parametrize("made", ["folder", "file", "dangling link"])
def test_name_that_exists_is_refused_before_anything_is_read(made, tmp_path):
    out = tmp_path / "out"
    match made:
        case "folder":
            out.mkdir()
        case "file":
            out.touch()
        case _:
            out.symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"out exists: give the name of a folder that does not"):
        convert(str(tmp_path / "absent"), out)


def test_folder_to_write_in_must_exist(tmp_path):
    with pytest.raises(ValueError, match=r"absent is no folder: make it first"):
        convert(str(tmp_path), tmp_path / "absent" / "out")


def test_conversion_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    source = tiny_llama(tmp_path / "source")
    monkeypatch.setattr(convert_module, "write_orbax", fail)
    with pytest.raises(KeyboardInterrupt):
        convert(str(source), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


KILLED_LATE = """
import sys, time
from pathlib import Path
from typing import Any
import jaxvllm.convert as module

def write_text_never(self, *args, **kwargs):
    print("weights written", flush=True)
    time.sleep(600)

Path.write_text = write_text_never  # the marker is what is written last
module.convert(sys.argv[1], Path(sys.argv[2]))
"""


def test_killed_conversion_is_no_model(tmp_path):
    source, out = tiny_llama(tmp_path / "source"), tmp_path / "out"
    command = [sys.executable, "-c", KILLED_LATE, str(source), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "weights written\n"
        os.kill(process.pid, signal.SIGKILL)
    assert not out.exists()
    [left] = [path for path in tmp_path.iterdir() if path != source]
    assert left.name.startswith("out.unfinished-")
    with pytest.raises(ValueError, match="interrupted: delete it and convert again"):
        load_model(left)
    convert(str(source), out)  # what was left is not in the way
    assert load_model(out)[0].num_layers == 3


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a busy machine takes its time
@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}], ids=str)
def test_smollm2_gives_the_same_tokens_after_conversion(options, tmp_path):
    convert(str(demo_model_path()), tmp_path / "out", dtype="float32", **options)
    one = make_llm(demo_model_path(), **options)
    other = make_llm(tmp_path / "out")
    assert other.config.eos == one.config.eos
    assert_same_tokenizer(one.tokenizer, other.tokenizer)
    question = [{"role": "user", "content": "List three primary colours."}]
    ids = one.tokenizer.apply_chat_template(question)
    assert other.tokenizer.apply_chat_template(question) == ids
    prompts = [ids, "The capital of France is"]
    assert tokens_of(one, prompts, 12) == tokens_of(other, prompts, 12)
