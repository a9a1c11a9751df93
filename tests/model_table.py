"""Writes the table of docs/models.md: each recorded case run again, as the parity tests run it.

    python tests/model_table.py [MODEL_TYPE ...]

Takes a few minutes; needs what the tests need. With model types, the rows of the others stay as they are.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # this checkout, whatever is installed

from engines import GREEDY, make_llm  # noqa: E402  # need the path above
from gguf_files import ARCHITECTURES as GGUF_ARCHITECTURES  # noqa: E402
from model_steps import prefill  # noqa: E402
from tiny_models import tiny_model  # noqa: E402

from jaxvllm import SamplingParams  # noqa: E402
from jaxvllm.models import registry  # noqa: E402
from jaxvllm.models.checkpoint.loader import load_model  # noqa: E402

PAGE = ROOT / "docs/models.md"
BEGIN, END = "<!-- table: python tests/model_table.py -->", "<!-- end of the table -->"
LENGTHS = {"phi3_longrope": (150, 400)}  # the original context is one engine's, what goes past it another's


def main(wanted: list[str]):
    recorded = json.loads((ROOT / "tests/data/expected_tiny.json").read_text())
    before, _, rest = PAGE.read_text().partition(BEGIN)
    old, _, after = rest.partition(END)
    rows = [
        "| `model_type` | GGUF | what it is | case | tokens equal | largest logit difference |",
        "|---|---|---|---|---|---|",
    ]
    for model_type, architecture in sorted(registry.ARCHITECTURES.items()):
        if wanted and model_type not in wanted:
            rows += [line for line in old.splitlines() if line.startswith(f"| `{model_type}` |")]
            continue
        what = (architecture.make.__doc__ or "").strip().splitlines()[0]
        for name, case in recorded.items():
            if case["model_type"] == model_type:
                equal, total, largest = measure(case, LENGTHS.get(name, (400,)))
                gguf = f"`{GGUF_ARCHITECTURES[model_type]}`"
                rows.append(f"| `{model_type}` | {gguf} | {what} | {name} | {equal} of {total} | {largest:.0e} |")
                print(rows[-1], flush=True)
                what = ""
    PAGE.write_text(before + "\n".join([BEGIN, "", *rows, "", END]) + after)


def measure(case: dict[str, Any], lengths: tuple[int, ...]) -> tuple[int, int, float]:
    """Returns how many greedy tokens are equal, of how many, and the largest difference of a recorded logit."""
    equal, total, largest = 0, 0, 0.0
    shortest = 0
    for max_len in lengths:
        prompts = [p for p in case["prompts"] if shortest < len(p["prompt_token_ids"]) + len(p["token_ids"]) <= max_len]
        shortest = max_len
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_model(Path(folder), case["model_type"], **case["overrides"])
            tokens = greedy(path, prompts, max_len)
            _, model = load_model(path)
        model.max_len = max_len
        all_logits = prefill(model, [p["prompt_token_ids"] + p["token_ids"] for p in prompts])
        for prompt, found, logits in zip(prompts, tokens, all_logits, strict=True):
            equal += sum(ours == theirs for ours, theirs in zip(found, prompt["token_ids"], strict=True))
            total += len(found)
            at_steps = logits[len(prompt["prompt_token_ids"]) - 1 : -1][case["logit_steps"]]
            difference = at_steps[:, case["logit_token_ids"]] - np.array(prompt["logits"])
            largest = max(largest, float(np.abs(difference).max()))
    return equal, total, largest


def greedy(path: Path, prompts: list[dict[str, Any]], max_len: int) -> list[list[int]]:
    """Returns the engine's tokens: batched, prefill in chunks of at most 96 tokens."""
    llm = make_llm(
        path,
        max_model_len=max_len,
        max_num_batched_tokens=96,
        token_buckets=(96,),
        seq_buckets=(8,),
        kvcache_block_size=16,
        num_kvcache_blocks=256,
    )
    params = SamplingParams(**GREEDY, max_tokens=len(prompts[0]["token_ids"]))
    return [out.token_ids for out in llm.generate([p["prompt_token_ids"] for p in prompts], params, use_tqdm=False)]


if __name__ == "__main__":
    main(sys.argv[1:])
