from typing import Any

import numpy as np
import pytest

from jaxvllm import SamplingParams


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e300),
        ("temperature", "hot"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 65),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["</s>"]),
        ("stop_token_ids", "</s>"),
        ("stop_token_ids", 7),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 0.5),
        ("ignore_eos", "no"),
    ],
)
def test_value_out_of_range_is_refused_by_name(option, value):
    with pytest.raises(ValueError, match=option):
        SamplingParams(**{option: value})


def test_nanovllm_arguments_work_by_position():
    params = SamplingParams(0.6, 256, True)
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (0.6, 256, True)


def test_defaults_are_nanovllm_s():
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (1.0, 64, False)


def test_stop_ids_become_a_tuple_whatever_list_the_user_gave():
    stop_token_ids = [3, 1]
    params = SamplingParams(stop_token_ids=stop_token_ids)
    stop_token_ids.append(9)
    assert params.stop_token_ids == (3, 1)


def test_numpy_scalars_are_stored_as_python_s():
    given: dict[str, Any] = {
        "temperature": np.float32(0.5),
        "max_tokens": np.int64(4),
        "top_k": np.int32(3),
        "ignore_eos": np.True_,
        "stop_token_ids": np.array([3, 1]),
        "seed": np.uint64(2**64 - 1),
    }
    params = SamplingParams(**given)
    assert params == SamplingParams(
        temperature=0.5, max_tokens=4, top_k=3, ignore_eos=True, stop_token_ids=(3, 1), seed=2**64 - 1
    )
    kept = [getattr(params, name) for name in given if name != "stop_token_ids"]
    assert {type(value) for value in [*kept, *params.stop_token_ids]} == {int, float, bool}


@pytest.mark.parametrize(("misspelt", "meant"), [("max_token", "max_tokens"), ("stop_token_id", "stop_token_ids")])
def test_misspelt_name_is_refused_with_the_nearest_one(misspelt, meant):
    options: dict[str, Any] = {misspelt: 3}
    with pytest.raises(ValueError, match=f"unknown sampling parameter '{misspelt}': did you mean '{meant}'"):
        SamplingParams(**options)


def test_name_like_no_other_is_refused_with_the_list():
    options: dict[str, Any] = {"zzz": 3}
    with pytest.raises(ValueError, match="the sampling parameters are temperature, max_tokens"):
        SamplingParams(**options)
