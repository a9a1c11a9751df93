import pytest

from jaxvllm import RequestOutput


@pytest.fixture
def output():
    return RequestOutput(
        request_id=3, text="hi", token_ids=[5, 6], finish_reason="stop", num_prompt_tokens=4, num_cached_tokens=0
    )


def test_fields_are_read_by_name_as_in_nanovllm(output):
    assert output["text"] == output.text == "hi"
    assert output["token_ids"] == output.token_ids == [5, 6]


def test_unknown_field_is_a_key_error_that_lists_the_fields(output):
    with pytest.raises(KeyError, match=r"logits.*text, token_ids"):
        output["logits"]
