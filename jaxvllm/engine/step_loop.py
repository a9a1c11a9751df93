"""The loop of an engine: schedule, dispatch, read, settle. Any scheduler policy, any runner, real or simulated."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from jaxvllm.engine.scheduler import Scheduler
from jaxvllm.engine.step import ScheduledStep


class Runner(Protocol):
    """What runs the steps: `ModelRunner` on a device, a simulation in tests."""

    def dispatch(self, step: ScheduledStep) -> Any:
        """Starts a step without waiting for it; returns a handle of the ids that it samples."""
        ...

    def is_done(self, ids: Any) -> bool:
        """Whether `read` would return without waiting."""
        ...

    def read(self, ids: Any, num_seqs: int) -> list[int]:
        """Waits for a step and returns its ids, one per sequence."""
        ...


class Clock(Protocol):
    """Where the loop's time is counted: `HostTimes`."""

    hidden_host_s: float  # host work while the device was known to be busy

    @property
    def busy_s(self) -> float: ...  # host work and transfers

    def phase(self, name: Literal["schedule", "postprocess"]) -> AbstractContextManager: ...


class StepLoop:
    """Runs one step at a time, or with `is_ahead` one step ahead of the ids that it reads.

    `is_ahead` may be set between any two steps. Ahead, at most one step is in flight when `run_step` returns. The
    tokens are the same; block decisions may lag by one step. `on_dispatch`, where given, sees every step before the
    runner does.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Clock,
        *,
        is_ahead: bool,
        on_dispatch: Callable[[ScheduledStep], None] | None = None,
    ):
        self.scheduler, self.runner, self.clock = scheduler, runner, clock
        self.is_ahead = is_ahead
        self.on_dispatch = on_dispatch
        self._in_flight: tuple[ScheduledStep, Any] | None = None  # the step dispatched last and the ids it samples
        self._busy_s_at_read = 0.0  # host work done when ids were last read

    def run_step(self) -> ScheduledStep:
        """Takes the ids of one step and returns it; ahead, the next one has been dispatched before.

        The scheduler must have something to do. Where this raises, call `drop_step_in_flight`.
        """
        clock = self.clock
        if self._in_flight is None or all(seq.is_finished for seq in self._in_flight[0].seqs):
            with clock.phase("schedule"):
                first = self.scheduler.schedule()
            self._in_flight = self._dispatch(first)
            self._busy_s_at_read = clock.busy_s  # nothing so far was hidden
        step, ids = self._in_flight
        following = self._dispatch_ahead() if self.is_ahead else None
        if not self.runner.is_done(ids):  # the device was busy all the while
            clock.hidden_host_s += clock.busy_s - self._busy_s_at_read
        token_ids = self.runner.read(ids, len(step.seqs))
        self._in_flight, self._busy_s_at_read = following, clock.busy_s
        with clock.phase("postprocess"):
            self.scheduler.settle(step, token_ids)
        return step

    def drop_step_in_flight(self):
        """Forgets the step whose ids have not been read: its sequences must be restarted."""
        self._in_flight = None

    def _dispatch_ahead(self) -> tuple[ScheduledStep, Any] | None:
        """Dispatches the step after the one in flight, unless it takes that one's ids to schedule it."""
        with self.clock.phase("schedule"):
            following = self.scheduler.schedule_ahead()
        return None if following is None else self._dispatch(following)

    def _dispatch(self, step: ScheduledStep) -> tuple[ScheduledStep, Any]:
        if self.on_dispatch is not None:
            self.on_dispatch(step)
        ids = self.runner.dispatch(step)
        with self.clock.phase("postprocess"):
            self.scheduler.advance(step)
        return step, ids
