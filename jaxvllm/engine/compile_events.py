"""Counts what XLA compiles in this process, and keeps the compilation cache.

jax reports each compilation as an event; one listener for the process adds them up, readers take differences.
"""

from dataclasses import dataclass
from threading import Lock
from typing import Self

import jax
from jax import monitoring

from jaxvllm.cache_folder import cache_folder

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
