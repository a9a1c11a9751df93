"""Where an engine's time goes, by phase of a step; the same names appear as scopes in a `jax.profiler` trace."""

from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, get_args

from jax.profiler import TraceAnnotation

Phase = Literal["schedule", "batch", "transfer", "dispatch", "wait", "read", "postprocess"]
PHASES: tuple[Phase, ...] = get_args(Phase)
HOST_WORK: tuple[Phase, ...] = ("schedule", "batch", "dispatch", "postprocess")
TRANSFERS: tuple[Phase, ...] = ("transfer", "read")


@dataclass(slots=True)
class HostTimes:
    """Seconds per phase since the engine was made.

    schedule and postprocess are the scheduler's; batch builds a step's buffer, transfer hands it to the device,
    dispatch starts the program (and compiles it, where it is new); wait is for the device, read copies the ids.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # by phase
    hidden_host_s: float = 0.0  # host work and transfers while the device was known to be busy

    def phase(self, name: Phase) -> "_Timer":
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

    def __init__(self, seconds: dict[str, float], name: Phase):
        self._seconds, self._name = seconds, name
        self._annotation = TraceAnnotation(name)

    def __enter__(self):
        self._annotation.__enter__()
        self._start = perf_counter()

    def __exit__(self, *error):
        self._seconds[self._name] += perf_counter() - self._start
        self._annotation.__exit__(*error)
