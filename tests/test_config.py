import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxvllm.config import PRESETS, EngineConfig, read_preset


def _untyped(**options: Any) -> dict[str, Any]:
    """Options as a user gives them: the type checker need not agree."""
    return options


def test_nanovllm_options_keep_their_names():
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert names >= {
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_model_len",
        "gpu_memory_utilization",
        "tensor_parallel_size",
        "enforce_eager",
        "kvcache_block_size",
        "num_kvcache_blocks",
    }


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("max_num_seq", "max_num_seqs"),
        ("enforce_eagre", "enforce_eager"),
        ("block_size", "kvcache_block_size"),
    ],
)
def test_misspelt_option_is_refused_with_the_nearest_name(misspelt, meant):
    with pytest.raises(ValueError, match=f"{misspelt}.*{meant}"):
        EngineConfig(model="folder", **_untyped(**{misspelt: 1}))


def test_option_like_no_other_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"zzz.*the options are .*max_num_seqs"):
        EngineConfig(model="folder", **_untyped(zzz=1))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", 0),
        ("max_num_seqs", 2.0),
        ("max_num_seqs", True),
        ("max_model_len", 1),
        ("tensor_parallel_size", 0),
        ("kvcache_block_size", 1),
        ("num_kvcache_blocks", 0),
        ("num_kvcache_blocks", -2),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", float("nan")),
        ("gpu_memory_utilization", "0.9"),
        ("dtype", "float8"),
        ("attention_backend", "triton"),
        ("token_buckets", (64, 32)),
        ("token_buckets", (16, 64)),
        ("token_buckets", "16"),
        ("token_buckets", 5),
        ("eos", None),
        ("seq_buckets", (0, 256)),
        ("seq_buckets", (8,)),
        ("block_buckets", (4,)),
        ("seed", -1),
        ("seed", 1.5),
        ("eos", "</s>"),
        ("eos", [1, -2]),
        ("enforce_eager", "yes"),
    ],
)
def test_value_out_of_range_is_refused_by_name(option, value):
    with pytest.raises(ValueError, match=option):
        EngineConfig(model="folder", **{option: value})


@pytest.mark.parametrize(
    ("option", "value", "stored"),
    [
        ("max_num_seqs", np.int64(8), 8),
        ("kvcache_block_size", np.int32(32), 32),
        ("gpu_memory_utilization", np.float32(0.5), 0.5),
        ("enforce_eager", np.True_, True),
        ("eos", np.int64(2), 2),
        ("eos", np.array([2, 3]), frozenset({2, 3})),
        ("token_buckets", np.array([16, 8192]), (16, 8192)),
        ("seed", np.uint64(7), 7),
    ],
)
def test_numpy_scalars_are_stored_as_python_s(option, value, stored):
    kept = getattr(EngineConfig(model="folder", **_untyped(**{option: value})), option)
    assert kept == stored
    assert type(kept) is type(stored)
    if isinstance(kept, (tuple, frozenset)):
        assert {type(one) for one in kept} == {int}


@pytest.mark.parametrize("value", [True, np.True_, np.float64(8)])
def test_bool_and_float_of_numpy_are_no_integers(value):
    with pytest.raises(ValueError, match="max_num_seqs"):
        EngineConfig(model="folder", **_untyped(max_num_seqs=value))


def test_step_without_room_for_one_token_per_sequence_is_refused():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=4 is below max_num_seqs=8"):
        EngineConfig(model="folder", max_num_batched_tokens=4, max_num_seqs=8)


def test_default_buckets_double_up_to_the_limit():
    config = EngineConfig(
        model="folder", max_num_batched_tokens=100, max_num_seqs=12, max_model_len=50, kvcache_block_size=16
    )
    assert config.resolved_token_buckets() == (16, 32, 64, 100)
    assert config.resolved_seq_buckets() == (1, 2, 4, 8, 12)
    assert config.resolved_block_buckets() == (4,)


def test_config_is_frozen():
    config = EngineConfig(model="folder")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_num_seqs = 3  # pyright: ignore[reportAttributeAccessIssue]  # what is tested


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.toml")), ids=lambda path: path.stem)
def test_preset_is_valid_and_says_on_what_it_ran(path):
    EngineConfig(model="folder", **read_preset(path))
    header = path.read_text()
    assert all(f"# {word}:" in header for word in ("Hardware", "Command", "Expected"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_num_seq = 3", "did you mean 'max_num_seqs'"),
        ("max_num_seqs = ", "Invalid value"),
        ("seq_buckets = 8", "seq_buckets=8 is not a list of whole numbers"),
        ('seq_buckets = "16"', "seq_buckets='16' is not a list of whole numbers"),
        ('max_num_seqs = "8"', "max_num_seqs='8' is not a whole number"),
        ("max_model_len = 256.0", "max_model_len=256.0 is not a whole number"),
        ('enforce_eager = "no"', "enforce_eager='no' must be one of False, True"),
        ('model = "x"', "'model' cannot be part of a preset"),
        ("eos = 3", "'eos' cannot be part of a preset"),
        ("use_tqdm = false", "unknown option 'use_tqdm': the options are"),
    ],
)
def test_broken_preset_is_named(tmp_path, content, message):
    (tmp_path / "mine.toml").write_text(content)
    with pytest.raises(ValueError, match=rf"mine.toml: .*{message}"):
        read_preset(tmp_path / "mine.toml")


def test_missing_preset_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none.toml.*No such file"):
        read_preset(tmp_path / "none.toml")
