"""Runs requests through another engine, in that engine's own environment: started by `peers.py`.

Imports nothing of jaxvllm. For each line that arrives it runs all requests once and answers with the seconds as JSON.
"""

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from time import perf_counter, process_time


class Transformers:
    """A static batch: all prompts padded on the left to the longest, all completions as long as the longest."""

    packages = ("torch", "transformers")

    def __init__(self, model, dtype, requests):
        import torch  # pyright: ignore[reportMissingImports]  # all three are of the peer's environment
        import transformers
        from transformers import AutoModelForCausalLM

        self.torch = torch
        torch.set_num_threads(os.cpu_count() or 1)
        path = Path(model)
        options = {"dtype": getattr(torch, dtype)}
        if path.suffix == ".gguf":
            if hasattr(
                transformers, "GgufConfig"
            ):  # else unpacked at any rate: packed weights are another, slower thing
                options["quantization_config"] = transformers.GgufConfig(dequantize=True)
            self.model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(model, **options)
        longest = max(len(request["token_ids"]) for request in requests)
        self.ids = torch.zeros(len(requests), longest, dtype=torch.long)
        self.mask = torch.zeros_like(self.ids)
        for row, request in enumerate(requests):
            self.ids[row, longest - len(request["token_ids"]) :] = torch.tensor(request["token_ids"])
            self.mask[row, longest - len(request["token_ids"]) :] = 1
        self.num_new = max(request["max_tokens"] for request in requests)

    def run(self):
        with self.torch.inference_mode():
            out = self.model.generate(
                self.ids,
                attention_mask=self.mask,
                do_sample=False,
                min_new_tokens=self.num_new,
                max_new_tokens=self.num_new,
                pad_token_id=0,
            )
        assert len(out[0]) == self.ids.shape[1] + self.num_new


class LlamaCpp:
    """One request after the other: llama-cpp-python has no batch of its own."""

    packages = ("llama-cpp-python",)

    def __init__(self, model, dtype, requests):
        import llama_cpp  # pyright: ignore[reportMissingImports]

        longest = max(len(request["token_ids"]) + request["max_tokens"] for request in requests)
        threads = os.cpu_count() or 1
        self.model = llama_cpp.Llama(model, n_ctx=longest, n_threads=threads, n_threads_batch=threads, verbose=False)
        self.requests = requests

    def run(self):
        for request in self.requests:
            self.model.reset()
            new = self.model.generate(request["token_ids"], temp=0.0)
            for _ in range(request["max_tokens"]):
                next(new)


class VLLM:
    packages = ("vllm", "torch")

    def __init__(self, model, dtype, requests):
        from vllm import LLM, SamplingParams, TokensPrompt  # pyright: ignore[reportMissingImports]

        longest = max(len(request["token_ids"]) + request["max_tokens"] for request in requests)
        self.model = LLM(model, dtype=dtype, max_model_len=longest, enable_prefix_caching=False)
        self.prompts = [TokensPrompt(prompt_token_ids=request["token_ids"]) for request in requests]
        self.params = [SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True) for r in requests]

    def run(self):
        self.model.generate(self.prompts, self.params, use_tqdm=False)


def main(name, model, dtype, requests_file):
    requests = json.loads(Path(requests_file).read_text(encoding="utf-8"))
    kind = {"hf": Transformers, "llamacpp": LlamaCpp, "vllm": VLLM}[name]
    peer = kind(model, dtype, requests)
    print(json.dumps({"versions": {name: importlib.metadata.version(name) for name in kind.packages}}), flush=True)
    for _ in sys.stdin:
        start, cpu_start = perf_counter(), process_time()
        peer.run()
        seconds = {"run_s": perf_counter() - start, "cpu_s": process_time() - cpu_start}
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
