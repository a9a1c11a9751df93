import json
from pathlib import Path

import numpy as np
from model_steps import Runner, prefill
from tiny_models import tiny_qwen3

from jaxvllm.models.checkpoint.loader import load_model

EXPECTED = json.loads((Path(__file__).parent / "data/expected_tiny.json").read_text())


def test_chunks_and_decode_steps_give_the_logits_of_one_prefill_across_the_window(tmp_path):
    _, model = load_model(tiny_qwen3(tmp_path, **EXPECTED["qwen3_window"]["overrides"]))
    prompt = EXPECTED["qwen3_window"]["prompts"][4]["prompt_token_ids"]
    runner = Runner(model, 1, len(prompt))
    parts = [runner.step([chunk])[0] for chunk in (prompt[:23], prompt[23:25], prompt[25:-1])]
    parts.append(runner.step([prompt[-1:]], decode_only=True)[0])
    np.testing.assert_allclose(np.concatenate(parts), prefill(model, [prompt])[0], rtol=0, atol=1e-4)
