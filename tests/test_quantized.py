import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import GREEDY, make_llm
from flax import nnx
from model_steps import prefill
from tiny_models import tiny_llama, tiny_qwen3

from jaxvllm import SamplingParams
from jaxvllm.demo import demo_model_path
from jaxvllm.models.checkpoint.loader import load_model, open_checkpoint
from jaxvllm.models.quantized import QuantizedWeight, quantize


def random_weight(shape, seed=0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * rng.uniform(0.1, 3, (shape[0], 1))).astype(np.float32)


def test_rounding_is_at_most_half_a_step_of_its_channel():
    weight = random_weight((5000, 33))  # more rows than are quantised at once
    values, scales = quantize(weight)
    assert (np.abs(values).max(axis=1) == 127).all()
    assert (np.abs(values * scales[:, None] - weight) <= scales[:, None] * 0.5001).all()


def test_zeros_stay_zeros_and_what_is_not_finite_is_refused():
    values, scales = quantize(np.zeros((2, 4), np.float32))
    assert not values.any()
    assert np.isfinite(scales).all()
    for bad in (np.nan, np.inf, -np.inf):
        weight = np.ones((3, 4), np.float32)
        weight[1, 2] = bad
        with pytest.raises(ValueError, match="not finite"):
            quantize(weight)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_layers_products_are_quantised_and_nothing_else(make, tmp_path):
    folder = make(tmp_path, tokenizer=False)
    _, whole = load_model(folder)
    _, model = load_model(folder, quantization="int8")
    attention, mlp = model.layers[1].attention, model.layers[1].mlp
    for name, part in {
        "q": attention,
        "k": attention,
        "v": attention,
        "o": attention,
        "gate": mlp,
        "down": mlp,
    }.items():
        assert isinstance(getattr(part, name).weight[...], QuantizedWeight), name
    kept = {"/".join(map(str, path)): p[...] for path, p in nnx.to_flat_state(nnx.state(model))}
    names = {name for name, value in kept.items() if not isinstance(value, QuantizedWeight)}
    expected = {name for name in kept if "norm" in name or name.startswith(("embed", "head"))}
    assert names == expected
    np.testing.assert_array_equal(model.embed.weight[...], whole.embed.weight[...])
    rounded: Any = attention.q.weight[...]
    np.testing.assert_allclose(
        rounded.values * rounded.scales[:, None],
        whole.layers[1].attention.q.weight[...],
        atol=float(rounded.scales.max()) / 2 * 1.001,
    )


def test_weight_that_is_not_finite_is_named(tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = tiny_llama(tmp_path, tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.inf
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"'model.layers.1.mlp.up_proj.weight' cannot be int8: .* not finite"):
        load_model(folder, quantization="int8")


def test_engine_serves_int8_in_any_batch(tiny_llama_path):
    llm = make_llm(tiny_llama_path, quantization="int8")
    prompts = [[5, 6, 7], [8] * 40, [9, 3]]
    params = SamplingParams(**GREEDY, max_tokens=8)
    together = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    alone = [llm.generate([prompt], params, use_tqdm=False)[0].token_ids for prompt in prompts]
    assert together == alone
    assert all(len(tokens) == 8 for tokens in together)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a busy machine takes its time
def test_smollm2_in_int8_chooses_mostly_the_same_tokens(capsys):
    """Over 6 recorded prompts and their 64 tokens each, every token's next one, by the same text before it."""
    record = json.loads((Path(__file__).parent / "data" / "expected_smollm2.json").read_text())
    sequences = [prompt["prompt_token_ids"] + prompt["token_ids"] for prompt in record["prompts"][:6]]
    checkpoint = open_checkpoint(demo_model_path())
    whole = np.concatenate(prefill(load_model(checkpoint, "float32")[1], sequences))
    rounded = np.concatenate(prefill(load_model(checkpoint, "float32", quantization="int8")[1], sequences))
    differences = np.abs(whole - rounded)
    equal = whole.argmax(-1) == rounded.argmax(-1)
    with capsys.disabled():
        print(f"\nSmolLM2 int8: logits differ by {differences.max():.2f} at most, {differences.mean():.3f} on average;")
        print(f"{equal.mean():.1%} of {len(equal)} greedy tokens equal")
    assert equal.mean() > 0.93
    assert differences.max() < 4
