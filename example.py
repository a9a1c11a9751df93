"""The API in use: `python example.py [MODEL]`. Without a MODEL it takes the demo's, fetched once."""

import sys

from jaxvllm import LLM, SamplingParams
from jaxvllm.demo import demo_model_path

QUESTIONS = ["Why is the sky blue?", "Write one sentence about a lighthouse.", "What is 2 + 3?"]


def main():
    model = sys.argv[1] if len(sys.argv) > 1 else str(demo_model_path())
    llm = LLM(model, enforce_eager=True, max_model_len=512, max_num_seqs=4, max_num_batched_tokens=512)
    sampling_params = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=64)

    # All at once: the engine batches them. generate() takes plain text in the same way.
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    for question, output in zip(QUESTIONS, llm.chat(conversations, sampling_params), strict=True):
        print(f"\n> {question}\n{output.text}  [{output.finish_reason}, {len(output.token_ids)} tokens]")

    # One, as it comes.
    print("\n> Once upon a time", end="")
    for text in llm.stream("Once upon a time", sampling_params):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
