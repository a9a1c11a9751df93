"""What an engine counts: its steps and tokens, its time by phase, and what XLA compiled for it.

The phases of a step appear under the same names as scopes in a `jax.profiler` trace. jax reports each compilation as
an event; one listener for the process adds them up, and readers take differences.
"""

from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter
from typing import Literal, Self, get_args

import jax
from jax import monitoring
from jax.profiler import TraceAnnotation

from jaxvllm.cache_folder import cache_folder
from jaxvllm.engine.step import ScheduledStep

HostPhase = Literal["schedule", "batch", "transfer", "dispatch", "wait", "read", "postprocess"]
PHASES: tuple[HostPhase, ...] = get_args(HostPhase)
HOST_WORK: tuple[HostPhase, ...] = ("schedule", "batch", "dispatch", "postprocess")
TRANSFERS: tuple[HostPhase, ...] = ("transfer", "read")


@dataclass(slots=True)
class HostTimes:
    """Seconds per phase since the engine was made.

    schedule and postprocess are the scheduler's; batch builds a step's buffer, transfer hands it to the device,
    dispatch starts the program (and compiles it, where it is new); wait is for the device, read copies the ids.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # by phase
    hidden_host_s: float = 0.0  # host work and transfers while the device was known to be busy

    def phase(self, name: HostPhase) -> "_Timer":
        return _Timer(self.seconds, name)

    @property
    def host_s(self) -> float:
        return sum(self.seconds[name] for name in HOST_WORK)

    @property
    def transfer_s(self) -> float:
        return sum(self.seconds[name] for name in TRANSFERS)

    @property
    def busy_s(self) -> float:
        """Everything but waiting."""
        return self.host_s + self.transfer_s


class _Timer:
    """Adds the time between entering and leaving to a phase."""

    __slots__ = ("_annotation", "_name", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], name: HostPhase):
        self._seconds, self._name = seconds, name
        self._annotation = TraceAnnotation(name)

    def __enter__(self):
        self._annotation.__enter__()
        self._start = perf_counter()

    def __exit__(self, *error):
        self._seconds[self._name] += perf_counter() - self._start
        self._annotation.__exit__(*error)


_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"  # also fires when the cache answers
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCount:
    """Programs asked of the compiler so far, and how many of them came from the cache on disk."""

    num_requests: int = 0
    num_cache_hits: int = 0
    compile_s: float = 0.0  # summed over threads

    @property
    def num_compiled(self) -> int:
        return self.num_requests - self.num_cache_hits

    def __sub__(self, earlier: Self) -> "CompileCount":
        return CompileCount(
            num_requests=self.num_requests - earlier.num_requests,
            num_cache_hits=self.num_cache_hits - earlier.num_cache_hits,
            compile_s=self.compile_s - earlier.compile_s,
        )


class _Listener:
    """Adds up jax's events; they arrive from any thread that compiles."""

    def __init__(self):
        self.lock = Lock()
        self.count = CompileCount()
        monitoring.register_event_duration_secs_listener(self.on_duration)
        monitoring.register_event_listener(self.on_event)

    def on_duration(self, event: str, duration_secs: float, **_: str | int):
        if event == _COMPILE_EVENT:
            self._add(num_requests=1, compile_s=duration_secs)

    def on_event(self, event: str, **_: str | int):
        if event == _CACHE_HIT_EVENT:
            self._add(num_cache_hits=1)

    def _add(self, *, num_requests: int = 0, num_cache_hits: int = 0, compile_s: float = 0.0):
        with self.lock:
            self.count = CompileCount(
                num_requests=self.count.num_requests + num_requests,
                num_cache_hits=self.count.num_cache_hits + num_cache_hits,
                compile_s=self.count.compile_s + compile_s,
            )


_listener = _Listener()  # jax has no way to take a listener back, so there is one for the life of the process


def compile_count() -> CompileCount:
    """What was compiled in this process since this module was imported."""
    return _listener.count


def enable_compilation_cache():
    """Keeps compiled programs in the user's cache folder, however quick they were to compile.

    A folder that the user chose (`JAX_COMPILATION_CACHE_DIR`, or jax's own setting) is left as it is.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@dataclass(slots=True)
class EngineStats:
    """Counts and times since the engine was made. A step's time includes its compilation, if it compiled."""

    start_s: float = 0.0  # weights, cache and warm-up
    num_steps: int = 0
    num_prompt_tokens: int = 0  # run through prefill, recomputed ones included, cached ones not
    num_generated_tokens: int = 0
    num_decode_tokens: int = 0  # generated by decode steps: the rest came from a prefill's last token
    prefill_s: float = 0.0
    decode_s: float = 0.0
    compiled: CompileCount = field(default_factory=CompileCount)
    times: HostTimes = field(default_factory=HostTimes)
    compiled_before: CompileCount = field(default_factory=CompileCount)  # by this process, before the engine was made

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.num_prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return self.num_decode_tokens / self.decode_s if self.decode_s else 0.0

    def count_step(self, step: ScheduledStep, num_new_tokens: int, step_s: float):
        """Adds a step that gave `num_new_tokens` tokens and took `step_s` seconds."""
        self.num_steps += 1
        self.num_generated_tokens += num_new_tokens
        if step.is_prefill:
            self.num_prompt_tokens += step.num_tokens
            self.prefill_s += step_s
        else:
            self.num_decode_tokens += num_new_tokens
            self.decode_s += step_s
        self.count_compiled()

    def count_compiled(self):
        self.compiled = compile_count() - self.compiled_before
