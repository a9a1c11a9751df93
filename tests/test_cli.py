"""The commands, with a stand-in for the engine, and `generate` and `chat` once with a real tiny one."""

import dataclasses
import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from engines import SMALL

from jaxvllm.cli import main
from jaxvllm.cli.compile import compile_command
from jaxvllm.cli.generate import generate
from jaxvllm.config import DEFAULTS
from jaxvllm.outputs import RequestOutput
from jaxvllm.sampling_params import SamplingParams


class FakeTokenizer:
    def check_chat_template(self):
        pass

    def apply_chat_template(self, messages, add_generation_prompt=True):
        if len(messages[-1]["content"]) > 40:
            raise ValueError("the prompt is too long: shorten it.")
        return [dict(message) for message in messages]  # stands for the ids; the fake engine shows what it got


class FakeLLM:
    """Answers every prompt with "<n> messages, red and blue." in several pieces."""

    made: list["FakeLLM"] = []  # noqa: RUF012  # emptied by the fixture

    def __init__(self, model, **options):
        if model == "broken":
            raise ValueError("broken:\nno such model.")
        if model == "missing":
            raise FileNotFoundError(2, "No such file or directory", "missing")
        self.model, self.options = model, options
        self.tokenizer = FakeTokenizer()
        self.prompts, self.params, self.closed = [], None, 0
        self.interrupt_after = None
        compiled = SimpleNamespace(num_compiled=2, num_cache_hits=1, compile_s=3.25)
        self.stats = SimpleNamespace(
            num_prompt_tokens=35,
            num_decode_tokens=14,
            prefill_tokens_per_s=100.0,
            decode_tokens_per_s=20.0,
            compiled=compiled,
        )
        FakeLLM.made.append(self)

    def generate(self, prompts, sampling_params, use_tqdm=True):
        self.prompts, self.params = prompts, sampling_params
        return [
            RequestOutput(
                request_id=i,
                text=f" é{i}",
                token_ids=[i],
                finish_reason="stop",
                num_prompt_tokens=3,
                num_cached_tokens=0,
            )
            for i, _ in enumerate(prompts)
        ]

    def stream(self, prompt, sampling_params):
        self.prompts.append(prompt)
        self.params = sampling_params
        return self._deltas(len(prompt))

    def _deltas(self, num_messages):
        try:
            for i, text in enumerate([f"{num_messages} messages", ", red", " and", " blue."]):
                if i == self.interrupt_after:
                    signal.raise_signal(signal.SIGINT)
                yield text
        finally:
            self.closed += 1


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr("jaxvllm.llm.LLM", FakeLLM)
    monkeypatch.setattr("jaxvllm.demo.demo_model_path", lambda: SimpleNamespace(name="demo.gguf"))
    FakeLLM.made.clear()
    return FakeLLM.made


def run(*arguments, stdin=None):
    return CliRunner().invoke(main, arguments, input=stdin)


def test_help_comes_without_jax_or_transformers():
    code = "import sys, jaxvllm.cli; print([m for m in ('jax', 'transformers', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
    for command in ([], ["generate"], ["chat"], ["demo"]):
        result = run(*command, "--help")
        assert result.exit_code == 0
        assert result.stdout.startswith("Usage: ")


def test_python_m_jaxvllm_is_the_command():
    result = subprocess.run([sys.executable, "-m", "jaxvllm", "--version"], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout.startswith("jaxvllm, version ")


def test_generate_prints_the_completion(fake):
    result = run("generate", "some/model", "Hello", "--temperature", "0", "--max-tokens", "7", "--stop-token-id", "5")
    assert (result.exit_code, result.stdout) == (0, " é0\n")
    [llm] = fake
    assert (llm.model, llm.prompts) == ("some/model", ["Hello"])
    assert (llm.params.temperature, llm.params.max_tokens, llm.params.stop_token_ids) == (0, 7, (5,))


def test_generate_prints_prompts_beside_several_completions(fake):
    assert run("generate", "m", "A", "B").stdout == "A é0\n\nB é1\n\n"


def test_generate_prints_json_lines(fake):
    lines = [json.loads(line) for line in run("generate", "m", "A", "B", "--json").stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["A", "B"]
    assert lines[1]["text"] == " é1"
    assert lines[1]["finish_reason"] == "stop"


def test_generate_reads_standard_input_for_a_dash(fake):
    run("generate", "m", "-", stdin="from a pipe")
    assert fake[0].prompts == ["from a pipe"]


def test_engine_options_reach_the_engine(fake):
    run(
        "generate",
        "m",
        "A",
        "--dtype",
        "float32",
        "--token-buckets",
        "16,64",
        "--max-model-len",
        "64",
        "--enforce-eager",
    )
    options = fake[0].options
    assert options["dtype"] == "float32"
    assert options["token_buckets"] == (16, 64)
    assert options["max_model_len"] == 64
    assert options["enforce_eager"] is True


def test_every_engine_option_of_a_command_has_the_engine_s_default(fake):
    run("generate", "m", "A")
    options = {name: value for name, value in fake[0].options.items() if name != "use_tqdm"}
    assert options == {name: DEFAULTS[name] for name in options}


def test_every_sampling_parameter_but_the_seed_reaches_the_request(fake):
    names = {option.name for option in generate.params}
    assert {field.name for field in dataclasses.fields(SamplingParams)} <= names


def test_compile_and_generate_share_spelling_and_defaults():
    defaults = {option.name: option.default for option in generate.params}
    shared = [option for option in compile_command.params if option.name not in ("chip", "model")]
    assert shared
    assert {option.name: option.default for option in shared} == {o.name: defaults[o.name] for o in shared}
    assert "--kvcache-block-size" in [name for option in shared for name in option.opts]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "broken", "A"], "Error: broken: no such model."),
        (["chat", "broken"], "Error: broken: no such model."),
        (["generate", "missing", "A"], "Error: [Errno 2] No such file or directory: 'missing'"),
        (
            ["generate", "m", "A", "--temperature", "-1"],
            "Error: temperature=-1.0 is negative: use 0 for greedy decoding.",
        ),
    ],
)
def test_a_users_error_is_one_line_without_a_traceback(fake, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr == message + "\n"
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments", [["generate", "m"], ["generate", "m", "A", "--token-buckets", "1,x"], ["generate", "m", "A", "--nope"]]
)
def test_a_wrong_command_line_exits_with_2(fake, arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_debug_lets_the_error_through(fake):
    result = run("--debug", "generate", "broken", "A")
    assert isinstance(result.exception, ValueError)


def test_a_fault_of_our_own_is_not_dressed_up(fake, monkeypatch):
    monkeypatch.setattr(FakeLLM, "generate", lambda *_, **__: [][0])
    assert isinstance(run("generate", "m", "A").exception, IndexError)


def test_chat_remembers_what_was_said(fake):
    result = run("chat", "m", "--system", "Be brief.", stdin="Hi\n\nAgain\n/exit\nnever read\n")
    assert result.exit_code == 0
    assert "2 messages, red and blue.\n" in result.stdout
    assert "4 messages, red and blue.\n" in result.stdout
    assert [message["role"] for message in fake[0].prompts[1]] == ["system", "user", "assistant", "user"]
    assert fake[0].prompts[1][2]["content"] == "2 messages, red and blue."


def test_chat_forgets_on_reset_and_leaves_at_the_end_of_input(fake):
    result = run("chat", "m", "--system", "Be brief.", stdin="Hi\n/reset\nHi\n")
    assert result.exit_code == 0
    assert [len(prompt) for prompt in fake[0].prompts] == [2, 2]


def test_chat_names_a_command_it_does_not_know(fake):
    result = run("chat", "m", stdin="/rest\n/etc/hosts is a file\n")
    assert "/rest is no command" in result.stderr
    assert len(fake[0].prompts) == 1


def test_chat_goes_on_after_a_turn_that_is_refused(fake):
    result = run("chat", "m", stdin=f"{'long ' * 20}\nHi\n")
    assert result.exit_code == 0
    assert "Error: the prompt is too long: shorten it." in result.stderr
    assert [len(prompt) for prompt in fake[0].prompts] == [1]


def test_ctrl_c_stops_the_answer_and_keeps_the_session(fake, monkeypatch):
    monkeypatch.setattr(FakeLLM, "__init__", _interrupting(FakeLLM.__init__, after=2))
    result = run("chat", "m", stdin="Hi\nGo on\n")
    assert result.exit_code == 0
    assert "1 messages, red and\n" in result.stdout
    assert fake[0].closed == 2
    assert fake[0].prompts[1][1] == {"role": "assistant", "content": "1 messages, red and"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _interrupting(init, after):
    def make(self, model, **options):
        init(self, model, **options)
        self.interrupt_after = after

    return make


def test_demo_prints_the_answer_and_the_figures(fake):
    result = run("demo")
    assert result.exit_code == 0
    assert "> List three primary colours.\n1 messages, red and blue.\n" in result.stdout
    assert "prefill 35 tokens at 100.0 tokens/s, decode 14 tokens at 20.0 tokens/s" in result.stdout
    assert "2 programs compiled, 1 taken from the cache, 3.2 s" in result.stdout
    assert fake[0].params.temperature == 0


def test_demo_has_as_many_programs_as_it_needs(fake):
    from jaxvllm.config import EngineConfig
    from jaxvllm.engine.batch import make_buckets

    run("demo")
    options = {name: value for name, value in fake[0].options.items() if name != "use_tqdm"}
    assert len(make_buckets(EngineConfig(model="demo", **options))) == 2


def as_flags(options):
    """The command line of engine options."""
    flags = ["--enforce-eager"]
    for name, value in options.items():
        if name != "enforce_eager":
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            flags += ["--" + name.replace("_", "-"), text]
    return flags


TINY = [*as_flags(SMALL), "--temperature", "0", "--ignore-eos", "--max-tokens", "6"]


def test_generate_runs_a_real_engine(tiny_llama_path):
    result = run("generate", str(tiny_llama_path), "the thing", "--json", *TINY)
    output = json.loads(result.stdout)
    assert len(output["token_ids"]) == 6
    assert output["finish_reason"] == "length"


def test_chat_streams_from_a_real_engine(tiny_llama_path):
    result = run("chat", str(tiny_llama_path), *TINY, stdin="the\n/reset\nthe\n")
    assert (result.exit_code, result.exception) == (0, None)
    answers = [line for line in result.stdout.split("> ") if line.strip()]
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_demo_names_the_three_colours():
    result = run("demo")
    answer = result.stdout.lower()
    assert result.exit_code == 0
    assert all(colour in answer for colour in ("red", "blue", "yellow"))


def test_preset_gives_defaults_that_options_beside_it_override(fake, tmp_path):
    preset = tmp_path / "mine.toml"
    preset.write_text('dtype = "float32"\nmax_num_seqs = 4\ntoken_buckets = [64, 8192]\nenforce_eager = false\n')
    result = run("generate", "m", "hi", "--max-num-seqs", "8", "--config", str(preset))
    assert result.exit_code == 0
    options = fake[0].options
    assert (options["dtype"], options["max_num_seqs"], options["enforce_eager"]) == ("float32", 8, False)
    assert options["token_buckets"] == (64, 8192)


def test_misspelt_name_in_a_preset_is_one_line(tmp_path):
    (tmp_path / "mine.toml").write_text("max_num_seq = 4\n")
    result = run("generate", "m", "hi", "--config", str(tmp_path / "mine.toml"))
    assert result.exit_code == 1
    assert "did you mean 'max_num_seqs'" in result.stderr
