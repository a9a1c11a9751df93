"""NanoVLLM's benchmark workload: `python bench.py [MODEL]`. 256 requests, 100 to 1024 tokens in and out, sampled."""

import sys
from random import Random
from time import perf_counter

from jaxvllm import LLM, SamplingParams

NUM_REQUESTS = 256
LENGTHS = (100, 1024)  # tokens in, and tokens out
NUM_IDS = 10_000  # prompts are made of the vocabulary's first ids


def main():
    model = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B"
    llm = LLM(model, max_model_len=4096)
    rng = Random(0)
    prompts = [[rng.randrange(NUM_IDS) for _ in range(rng.randint(*LENGTHS))] for _ in range(NUM_REQUESTS)]
    sampling_params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(*LENGTHS)) for _ in prompts
    ]
    llm.generate("Benchmark:", SamplingParams(max_tokens=2), use_tqdm=False)  # whatever is done once is done
    start = perf_counter()
    llm.generate(prompts, sampling_params)
    seconds = perf_counter() - start
    num_tokens = sum(params.max_tokens for params in sampling_params)
    print(f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.2f} tokens/s")


if __name__ == "__main__":
    main()
