"""Times PyTorch's scaled_dot_product_attention over contiguous K and V: no paging, sequences of one length."""

import statistics
import time
from typing import Any

from tools.gpu.workloads import Workload


def time_attention(workload: Workload, *, copies: int, calls: int, repeats: int) -> dict[str, Any]:
    """Times a decode step, or whole prompts, over `copies` sets of K and V in turn.

    The tokens are shared evenly between the sequences.
    """
    import torch  # pyright: ignore[reportMissingImports]  # only where it is installed; the engine has no use for it

    device = "cuda" if torch.cuda.is_available() else "cpu"
    S, K, N, H = len(workload.context_lens), workload.num_kv_heads, workload.num_heads, workload.head_dim
    context = sum(workload.context_lens) // S
    new = 1 if workload.decode_only else context
    options = {"device": device, "dtype": getattr(torch, workload.dtype)}
    keys, values = ([torch.randn(S, K, context, H, **options) for _ in range(copies)] for _ in range(2))
    q = torch.randn(S, N, new, H, **options)

    def run_calls():
        x = q
        for i in range(calls):
            x = torch.nn.functional.scaled_dot_product_attention(
                x, keys[i % copies], values[i % copies], is_causal=new > 1, scale=H**-0.5, enable_gqa=N != K
            )

    run_calls()  # chooses its kernel, and warms up
    times = [_seconds(torch, device, run_calls) / calls for _ in range(repeats)]
    return {
        "median_s": statistics.median(times),
        "min_s": min(times),
        "max_s": max(times),
        "calls": calls,
        "repeats": repeats,
        "version": torch.__version__,
    }


def _seconds(torch: Any, device: str, work) -> float:
    """Times by the device's own events where it has them."""
    if device == "cpu":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000
