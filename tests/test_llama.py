import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from model_steps import Runner, prefill
from tiny_models import tiny_llama

from jaxvllm.models.checkpoint.loader import load_model

EXPECTED = json.loads((Path(__file__).parent / "data/expected_tiny.json").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(tiny_llama(tmp_path_factory.mktemp("llama")))[1]


def test_chunks_and_decode_steps_give_the_logits_of_one_prefill(model):
    prompts = [p["prompt_token_ids"] for p in EXPECTED["llama"]["prompts"] if len(p["prompt_token_ids"]) in (17, 63)]
    whole = prefill(model, prompts)
    runner = Runner(model, len(prompts), 63)
    parts = [runner.step([p[:5] for p in prompts])]
    parts.append(runner.step([prompts[0][5:16], prompts[1][5:62]]))
    parts.append(runner.step([p[-1:] for p in prompts], decode_only=True))
    for s, logits in enumerate(whole):
        np.testing.assert_allclose(np.concatenate([part[s] for part in parts]), logits, rtol=0, atol=1e-4)


def test_bfloat16_model_stays_near_and_has_float32_logits(tmp_path):
    _, model = load_model(tiny_llama(tmp_path), dtype="bfloat16")
    case = EXPECTED["llama"]
    prompts = case["prompts"][3:5]
    found = [logits[-1] for logits in prefill(model, [p["prompt_token_ids"] for p in prompts])]
    assert found[0].dtype == np.float32
    assert model.layers[0].attention.q.weight.dtype == jnp.bfloat16
    exact = np.array([p["logits"][0] for p in prompts])
    assert np.abs(np.array(found)[:, case["logit_token_ids"]] - exact).mean() < 0.05 * exact.std()


def test_every_row_of_an_embedding_larger_than_the_tokenizer_is_usable(model):
    # The tokenizer has 266 ids, the embedding 512 rows: a sampled id beyond the tokenizer comes back as input.
    logits = prefill(model, [[511, 266, 300, 265]])[0]
    assert logits.shape == (4, 512)
    assert np.isfinite(logits).all()
