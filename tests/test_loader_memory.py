"""How much of the host's memory a load takes, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_configs import LLAMA_CONFIG
from tiny_models import tiny_llama

LOAD = """
import sys
from pathlib import Path
import jax
import jax.numpy as jnp
from flax import nnx
from jaxvllm.models.checkpoint.loader import load_model

def peak_bytes():
    # Not getrusage, whose peak begins with that of the process that started this one.
    with open("/proc/self/status") as file:
        return int(dict(line.split(":", 1) for line in file)["VmHWM"].split()[0]) * 1024

load_model(Path(sys.argv[1]))  # 0.4 MB of weights: what every load takes is in the baseline
baseline = peak_bytes()
_, model = load_model(Path(sys.argv[2]), quantization=sys.argv[3])
weights = jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
print(sum(leaf.nbytes for leaf in weights), peak_bytes() - baseline)
"""
LARGE: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 11008, "head_dim": 128, "num_attention_heads": 16}
LARGE |= {"num_key_value_heads": 4, "num_hidden_layers": 12, "vocab_size": 32000, "torch_dtype": "bfloat16"}


def write_checkpoint(folder: Path) -> int:
    """Writes a Llama of 2 GB, a shard per layer, of the same number everywhere; returns its largest tensor's bytes."""
    import jax.numpy as jnp

    config = LLAMA_CONFIG | LARGE
    D, F, V, H = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    N, K = config["num_attention_heads"], config["num_key_value_heads"]

    def save(tensors: dict[str, tuple[int, ...]]):
        file = f"model-{len(files) + 1:05}.safetensors"
        save_file({name: np.full(shape, 0.5, jnp.bfloat16) for name, shape in tensors.items()}, folder / file)
        files.append(file)
        weight_map.update(dict.fromkeys(tensors, file))

    folder.mkdir()
    files, weight_map = [], {}
    save({"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)})
    for i in range(config["num_hidden_layers"]):
        tensors = {"self_attn.q_proj": (N * H, D), "self_attn.k_proj": (K * H, D), "self_attn.v_proj": (K * H, D)}
        tensors |= {"self_attn.o_proj": (D, N * H), "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D)}
        tensors |= {"mlp.down_proj": (D, F), "input_layernorm": (D,), "post_attention_layernorm": (D,)}
        save({f"model.layers.{i}.{name}.weight": shape for name, shape in tensors.items()})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return 2 * V * D


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.timeout(1800)  # a busy disk takes its time
def test_load_takes_the_weights_and_two_tensors(tmp_path, capsys):
    """2 GB in bfloat16; 16 MB are allowed beside, for Python's own."""
    tiny_llama(tmp_path / "small", tokenizer=False, torch_dtype="bfloat16")
    largest = write_checkpoint(tmp_path / "large")
    try:
        for quantization in ("auto", "int8"):
            command = [sys.executable, "-c", LOAD, str(tmp_path / "small"), str(tmp_path / "large"), quantization]
            result = subprocess.run(command, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr
            weights, taken = map(int, result.stdout.split())
            with capsys.disabled():
                sizes = f"weights {weights / 1e6:,.0f} MB, taken {taken / 1e6:,.0f}, largest tensor {largest / 1e6:.0f}"
                print(f"\n{quantization}: {sizes}")
            assert 0.9 * weights < taken <= weights + 2 * largest + 16e6
    finally:
        for file in (tmp_path / "large").glob("*.safetensors"):  # not left for pytest to keep
            file.unlink()
