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
