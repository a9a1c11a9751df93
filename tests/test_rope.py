import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models.rope import RopeConfig, inverse_frequencies, rotary_angles, rotate

RECORDED = json.loads((Path(__file__).parent / "data/expected_rope.json").read_text())
DEFAULT = RopeConfig(rope_type="default", theta=10000.0)


def read(parameters, max_position_embeddings=16384):
    return RopeConfig.from_parameters(parameters, max_position_embeddings=max_position_embeddings)


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["parameters"]["rope_type"])
def test_frequencies_and_attention_factors_are_those_of_transformers(case):
    rope = read(case["parameters"])
    frequencies = inverse_frequencies(rope, case["head_dim"], case["max_len"])
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, case["inverse_frequencies"], rtol=3e-7)
    assert rope.attention_factor == pytest.approx(case["attention_factor"], rel=1e-12)


def test_recorded_cases_cover_every_type_of_transformers():
    types = {case["parameters"]["rope_type"] for case in RECORDED}
    assert types == {"default", "linear", "dynamic", "llama3", "yarn", "longrope"}
    long = [case["inverse_frequencies"] for case in RECORDED if case["parameters"]["rope_type"] == "longrope"]
    assert long[0] != long[1]  # on both sides of the original context


def test_divisors_divide_the_frequencies_one_by_one():
    rope = RopeConfig(rope_type="divisors", theta=10000.0, divisors=(1.0, 2.0, 4.0, 8.0))
    expected = inverse_frequencies(DEFAULT, 8, 64) / np.array([1, 2, 4, 8], np.float32)
    np.testing.assert_array_equal(inverse_frequencies(rope, 8, 64), expected)
    with pytest.raises(ValueError, match="4 rotary divisors do not fit head_dim=16"):
        inverse_frequencies(rope, 16, 64)


def test_unknown_type_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'mrope' is not supported.*default, linear, dynamic, llama3, yarn, longrope"):
        read({"rope_type": "mrope", "rope_theta": 1e4, "factor": 4.0})


def test_missing_value_is_refused_by_name():
    with pytest.raises(ValueError, match="'linear' needs factor"):
        read({"type": "linear", "rope_theta": 1e4})
    with pytest.raises(ValueError, match="'longrope' needs short_divisors"):
        read({"type": "longrope", "rope_theta": 1e4, "long_factor": [1.0]})
    with pytest.raises(ValueError, match="rope_theta is missing"):
        read({"rope_type": "default"})


def test_whole_numbers_in_the_file_are_read_as_floats():
    rope = read({"rope_type": "linear", "rope_theta": 10000, "factor": 4})
    assert rope == RopeConfig(rope_type="linear", theta=10000.0, factor=4.0)


def test_yarn_without_a_factor_stretches_the_original_context_to_the_models():
    rope = read({"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 4096})
    assert rope.factor == 4.0


def test_a_share_of_the_head_beyond_it_is_refused():
    with pytest.raises(ValueError, match=r"partial_rotary_factor=1\.5"):
        read({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.5})


def test_what_is_not_turned_stays():
    rope = RopeConfig(rope_type="default", theta=10000.0, rotary_share=0.5)
    x = np.random.RandomState(0).standard_normal((3, 2, 16)).astype(np.float32)
    turned = np.asarray(rotate(jnp.asarray(x), *rotary_angles(jnp.arange(3, dtype=jnp.int32), rope, 16, 64)))
    np.testing.assert_array_equal(turned[..., 8:], x[..., 8:])
    alone = rotate(jnp.asarray(x[..., :8]), *rotary_angles(jnp.arange(3, dtype=jnp.int32), DEFAULT, 8, 64))
    np.testing.assert_array_equal(turned[..., :8], alone)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rotation_is_a_complex_product_with_the_phase_of_the_position(dtype):
    positions = np.array([0, 1, 257, 40959, 131071], np.int32)
    x = np.random.RandomState(0).standard_normal((5, 3, 64)).astype(np.float32)
    turned = jax.jit(lambda x, p: rotate(x, *rotary_angles(p, DEFAULT, 64, 131072)))(jnp.asarray(x, dtype), positions)
    assert turned.dtype == dtype

    wide = np.asarray(jnp.asarray(x, dtype), np.float64)
    phases = positions.astype(np.float32)[:, None, None] * inverse_frequencies(
        DEFAULT, 64, 131072
    )  # float32, as models are trained
    expected = (wide[..., :32] + 1j * wide[..., 32:]) * np.exp(1j * phases.astype(np.float64))
    expected = np.concatenate([expected.real, expected.imag], axis=-1)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2  # bfloat16 rounds the result, not the phase
    np.testing.assert_allclose(np.asarray(turned, np.float64), expected, rtol=0, atol=tolerance)
