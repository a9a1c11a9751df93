"""The benchmarks' own arithmetic, and that each runs and says what a reader needs; none of these checks a speed."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from jaxvllm.bench import machine, metadata, report, requests
from jaxvllm.bench.measure import Work, make_engine, run_requests
from jaxvllm.bench.peers import Peer
from jaxvllm.bench.plain_block_manager import PlainBlockManager
from jaxvllm.bench.random_model import CONFIGS, RandomCheckpoint
from jaxvllm.bench.requests import Request
from jaxvllm.cli import main
from jaxvllm.engine.block_manager import BlockManager
from jaxvllm.engine.sequence import Sequence
from jaxvllm.engine.step import ScheduledStep

SMALL = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_kvcache_blocks": 32,
    "enforce_eager": True,
    "seq_buckets": (4,),
    "token_buckets": (64,),
}
FLAGS = [
    "--random=tiny", "--max-model-len=64", "--max-num-seqs=4", "--max-num-batched-tokens=64",
    "--num-kvcache-blocks=64", "--seq-buckets=4", "--token-buckets=64",
]  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    return make_engine(None, "tiny", SMALL)[0]


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    file = tmp_path_factory.mktemp("workload") / "requests.jsonl"
    lines = [{"prompt": [1, 2, 3], "max_tokens": 5}, {"prompt": [4] * 20, "max_tokens": 3, "temperature": 0.5}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return file


def last_json(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


class TestRequests:
    def test_nano_is_the_workload_of_bench_py(self):
        nano = requests.nano(32_000)
        assert len(nano) == 256
        assert all(100 <= len(r.token_ids) <= 1024 and 100 <= r.max_tokens <= 1024 for r in nano)
        assert max(max(r.token_ids) for r in nano) < 10_000
        assert nano == requests.nano(32_000)

    def test_ids_stay_within_the_vocabulary(self):
        for make in (requests.nano, requests.short, requests.shared_prefix):
            assert max(max(r.token_ids) for r in make(50)) < 50

    def test_shared_prefix_is_shared_and_the_rest_is_not(self):
        prompts = [r.token_ids for r in requests.shared_prefix(1000, 5, 16, 24)]
        assert {len(prompt) for prompt in prompts} == {24}
        assert len({tuple(prompt[:16]) for prompt in prompts}) == 1
        assert len({tuple(prompt[16:]) for prompt in prompts}) == 5

    def test_a_file_holds_ids_or_text(self, workload):
        first, second = requests.load(str(workload), 100, None)
        assert (first.token_ids, first.max_tokens, first.temperature) == ([1, 2, 3], 5, 0.0)
        assert second.temperature == 0.5
        text = workload.with_name("text.jsonl")
        text.write_text('{"prompt": "ab"}')
        [request] = requests.load(str(text), 100, lambda text: [len(text)])
        assert (request.token_ids, request.max_tokens) == ([2], 64)

    @pytest.mark.parametrize(
        ("line", "message"),
        [("{", "line 1"), ('{"prompt": [1], "tokens": 3}', "'tokens' is none of"), ('{"prompt": "a"}', "tokenizer")],
    )
    def test_a_line_that_is_no_request_is_named(self, tmp_path, line, message):
        file = tmp_path / "bad.jsonl"
        file.write_text(line)
        with pytest.raises(ValueError, match=message):
            requests.load(str(file), 100, None)
        with pytest.raises(ValueError, match="none of nano, short"):
            requests.load("absent", 100, None)


class TestRandomModel:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_every_config_is_one_that_loads(self, name):
        checkpoint = RandomCheckpoint(name)
        assert checkpoint.config.vocab_size == CONFIGS[name]["vocab_size"]
        assert checkpoint.shapes["model.embed_tokens.weight"] == (
            CONFIGS[name]["vocab_size"],
            CONFIGS[name]["hidden_size"],
        )

    def test_weights_are_the_same_each_time(self):
        first, again = (RandomCheckpoint("tiny").read("model.layers.0.mlp.up_proj.weight") for _ in range(2))
        assert (first == again).all()
        assert first.std() > 0

    def test_an_unknown_name_is_refused(self):
        with pytest.raises(ValueError, match="none of tiny"):
            RandomCheckpoint("huge")


class TestWork:
    def test_a_decode_reads_the_weights_and_the_context_once(self, engine):
        work = Work.of(engine)
        seq = Sequence(range(10), block_size=16)
        seq.num_cached_tokens, seq.num_scheduled_tokens = 9, 1
        work.add(ScheduledStep.of([seq], "decode"))
        per_layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64  # q and o, k and v, feed-forward, norms
        num_weights = 2 * per_layer + 64
        head = 512 * 64
        assert (work.num_weights, work.head_weights) == (num_weights, head)
        cache = 2 * 2 * 2 * 16 * 4  # layers, key and value, heads, size, bytes
        assert work.num_bytes == 4 * (num_weights + head) + 11 * cache
        assert work.num_flops == 2 * (num_weights + head) + 9.5 * 4 * 2 * 4 * 16
        assert work.floor_s == max(work.num_bytes / work.bytes_per_s, work.num_flops / work.flops_per_s)

    def test_a_run_counts_its_tokens_and_its_phases(self, engine):
        work = Work.of(engine)
        wanted = [Request(token_ids=[1, 2, 3], max_tokens=5), Request(token_ids=[4] * 20, max_tokens=3)]
        run = run_requests(engine, wanted, work)
        assert (run.num_generated_tokens, run.num_prompt_tokens, run.num_computed_tokens) == (8, 23, 23)
        assert run.num_steps == 5
        assert 0 < sum(run.phase_s.values()) <= run.run_s
        assert run.floor_s > 0
        assert engine.is_finished()

    def test_a_request_that_does_not_fit_is_refused(self, engine):
        with pytest.raises(ValueError, match="max_model_len=64"):
            run_requests(engine, [Request(token_ids=[1] * 60, max_tokens=30)])


class TestMetadata:
    def test_the_plain_block_manager_decides_as_ours(self):
        managers = [kind(40, 4) for kind in (BlockManager, PlainBlockManager)]
        tables: list[list[list[int]]] = [[], []]
        for manager, log in zip(managers, tables, strict=True):
            held = []
            for start, length in ((0, 17), (0, 12), (50, 30), (0, 25), (50, 31), (7, 9)):
                seq = Sequence(range(start, start + length), block_size=4)
                num_cached = manager.can_allocate(seq)
                if num_cached == -1:
                    log.append([-1])
                    continue
                manager.allocate(seq, num_cached)
                seq.num_scheduled_tokens = seq.num_tokens - seq.num_cached_tokens
                manager.hash_blocks(seq)
                log.append([num_cached, *seq.block_table])
                held.append(seq)
                if len(held) == 3:
                    manager.deallocate(held.pop(0))
            log.append(list(manager.free_block_ids))
        assert tables[0] == tables[1]
        assert any(row[0] > 0 for row in tables[0])

    def test_it_reports_every_phase(self):
        result = metadata.measure(num_blocks=2000, num_seqs=8, repeats=3)
        assert set(result["decode_step_of_8_ms"]) == {"schedule", "batch", "postprocess", "all"}
        assert result["times_faster_than_plain"] > 0


def test_a_command_line_names_files_and_not_where_they_lie():
    words = ["/opt/x/jaxvllm/__main__.py", "bench", "--model", "/home/me/m.gguf", "--output=/home/me/new.json"]
    words += ["--peer-python", "~/venv/bin/python", "--config", "configs/a.toml", "--random", "tiny model", "x" * 300]
    assert machine._command(words) == (
        "jaxvllm bench --model m.gguf --output=new.json --peer-python python --config configs/a.toml "
        f"--random 'tiny model' {'x' * 300}"
    )
    assert machine._command(["/opt/bin/jaxvllm"]) == "jaxvllm"


class TestCommands:
    def test_throughput_prints_a_table_and_one_json_line(self, workload, tmp_path):
        output = tmp_path / "out.json"
        arguments = ["bench", "throughput", *FLAGS, f"--workload={workload}", "--repeats=1", f"--output={output}"]
        result = last_json(CliRunner().invoke(main, arguments))
        assert result == json.loads(output.read_text())
        assert result["num_generated_tokens"] == 8
        assert result["start"]["num_programs"] == result["start"]["num_buckets"] == 2
        assert result["num_compiled_in_run"] == 0
        assert {"command", "hardware", "versions", "commit", "date", "load_average"} <= set(result["machine"])
        shares = [result[name] for name in ("host_share", "wait_share", "transfer_share")]
        assert all(0 <= share <= 1 for share in shares)

    def test_throughput_writes_a_trace_with_a_scope_per_phase(self, workload, tmp_path):
        arguments = ["bench", "throughput", *FLAGS, f"--workload={workload}", "--repeats=1", f"--profile={tmp_path}"]
        last_json(CliRunner().invoke(main, arguments))
        [trace] = tmp_path.rglob("*.xplane.pb")
        content = trace.read_bytes()
        for name in (b"schedule", b"batch", b"dispatch", b"wait", b"postprocess"):
            assert name in content

    def test_latency_gives_percentiles(self, workload):
        arguments = ["bench", "latency", *FLAGS, f"--workload={workload}", "--rate=100"]
        result = last_json(CliRunner().invoke(main, arguments))
        assert 0 < result["first_token_ms"]["p50"] <= result["first_token_ms"]["p99"]
        assert result["per_token_ms"]["p50"] > 0
        assert result["num_compiled_in_run"] == 0

    def test_an_output_without_a_folder_is_refused_before_anything_is_measured(self, tmp_path):
        result = CliRunner().invoke(main, ["bench", "metadata", f"--output={tmp_path}/none/x.json"])
        assert result.exit_code == 2
        assert "none is no folder" in result.output

    def test_prefix_gives_hit_rate_and_ratio(self):
        sizes = ["--requests=3", "--shared=32", "--length=40", "--max-tokens=2", "--repeats=1"]
        result = last_json(CliRunner().invoke(main, ["bench", "prefix", *FLAGS, *sizes]))
        assert result["saved_tokens"] == 2 * 32
        assert result["without_cache"]["num_computed_tokens"] == 3 * 40

    def test_attention_gives_its_share(self):
        assert last_json(CliRunner().invoke(main, ["bench", "attention"]))["floor_share"] > 0

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["throughput"], "either --model"),
            (["throughput", "--random=tiny", "--model=x"], "either --model"),
            (["latency", "--random=tiny", "--rate=0"], "--rate=0"),
            (["prefix", "--random=tiny", "--shared=9", "--length=9"], "--shared=9"),
            (["metadata", "--blocks=1"], "blocks=1"),
            (["attention", "--dtype=int8"], "--dtype=int8"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, arguments, message):
        result = CliRunner().invoke(main, ["bench", *arguments])
        assert result.exit_code == 1
        assert message in result.stderr


class TestPeers:
    def test_an_unknown_peer_is_refused(self):
        with pytest.raises(ValueError, match="none of hf, llamacpp, vllm"):
            Peer("other", "model", "float32", [])

    def test_a_peer_that_is_not_installed_is_refused_with_what_to_install(self):
        with pytest.raises(ValueError, match=r"cannot import vllm.*pip install vllm.*--peer-python"):
            Peer("vllm", "model", "float32", [], sys.executable)


class TestReport:
    def test_the_section_between_the_marks_is_replaced(self, tmp_path):
        document = tmp_path / "README.md"
        document.write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
        report.write_section(document, "new")
        assert document.read_text() == f"above\n{report.BEGIN}\nnew\n{report.END}\nbelow\n"

    def test_a_document_without_marks_is_refused(self, tmp_path):
        document = tmp_path / "README.md"
        document.write_text("text")
        with pytest.raises(ValueError, match="lacks the marks"):
            report.write_section(document, "new")

    def test_the_readme_s_section_is_what_the_kept_results_give(self):
        root = Path(__file__).parents[1]
        readme = (root / "README.md").read_text(encoding="utf-8")
        results = report.read_results(root / "docs/benchmarks")
        assert results
        assert report.markdown(results) in readme
