"""Run several experiments at once, in worker processes.

A worker runs one experiment after another. If it dies (out of memory, a crash in
compiled code), that experiment is reported as broken and a new worker takes its place.
"""

import contextlib
import dataclasses
import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait

from meanformer.experiments.framework import environment, registry
from meanformer.experiments.framework.experiment import Experiment
from meanformer.experiments.framework.progress import Progress
from meanformer.experiments.framework.records import Record, attempt, broken
from meanformer.experiments.framework.settings import Profile

SECONDS_BETWEEN_REPORTS = 0.2
# What a system that is out of memory sends; Windows has no name for it.
KILLED = 9


@dataclasses.dataclass(frozen=True)
class Started:
    """An experiment has been given to a worker."""

    name: str


@dataclasses.dataclass(frozen=True)
class Advanced:
    """An experiment has come this far, between 0 and 1."""

    name: str
    fraction: float


@dataclasses.dataclass(frozen=True)
class Finished:
    """An experiment has ended, well or not."""

    name: str
    record: Record


Event = Started | Advanced | Finished


def run_in_parallel(
    experiments: Sequence[Experiment], profile: Profile, jobs: int
) -> Iterator[Event]:
    """Run the experiments in worker processes and tell what happens, as it happens.

    Those expected to take longest start first. Leaving the loop early, or an
    exception in its body, ends the workers.
    """
    environment.limit_threads(jobs)
    waiting = sorted(experiments, key=lambda one: -estimate(one, profile))
    count = min(jobs, len(waiting))
    workers = [_Worker(profile) for _ in range(count)]
    try:
        while waiting or any(worker.experiment for worker in workers):
            for worker in workers:
                if waiting and not worker.experiment:
                    yield worker.give(waiting.pop(0))
            yield from _next_events(workers)
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process, the connection to it, and the experiment it is busy with."""

    def __init__(self, profile: Profile):
        self.profile = profile
        self.experiment: Experiment | None = None
        self.start_process()

    def start_process(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other_end = context.Pipe()
        self.process = context.Process(
            target=_work, args=(other_end, self.profile), daemon=True
        )
        self.process.start()
        other_end.close()

    def give(self, experiment: Experiment) -> Started:
        self.experiment, self.since = experiment, time.perf_counter()
        with contextlib.suppress(OSError):  # a dead worker is noticed when listening
            self.connection.send(experiment.name)
        return Started(experiment.name)

    def listen(self) -> Event:
        """The next message; a dead process counts as a broken experiment."""
        experiment = self.experiment
        assert experiment is not None, "only busy workers are listened to"
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            message = self._record_of_death(experiment)
            self.start_process()
        if isinstance(message, float):
            return Advanced(experiment.name, message)
        self.experiment = None
        return Finished(experiment.name, message)

    def end(self) -> None:
        self.process.terminate()
        self.process.join(timeout=2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()

    def _record_of_death(self, experiment: Experiment) -> Record:
        self.connection.close()
        self.process.join(timeout=5)
        code = self.process.exitcode
        cause = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
        hint = "; the machine may be out of memory" if code == -KILLED else ""
        error = f"The process running it ended with {cause}{hint}."
        parameters = experiment.settings(self.profile)
        return broken(experiment, self.profile, parameters, self.since, error)


def _next_events(workers: Sequence[_Worker]) -> Iterator[Event]:
    busy = {worker.connection: worker for worker in workers if worker.experiment}
    for connection in wait(list(busy)):
        yield busy[connection].listen()


def estimate(experiment: Experiment, profile: Profile) -> float:
    """Seconds that an experiment may take: the last time, or its author's guess."""
    known = environment.remembered_seconds(experiment.name, profile)
    return experiment.seconds if known is None else known


def _work(connection: Connection, profile: Profile) -> None:
    """What a worker process does: experiments by name, until nobody asks for more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            experiment = registry.find(connection.recv())
            progress = Progress(_throttled(connection))
            parameters = experiment.settings(profile)
            connection.send(
                attempt(experiment, parameters, profile=profile, progress=progress)
            )


def _throttled(connection: Connection):
    """A listener that passes on at most a few reports per second."""
    last = 0.0

    def listen(fraction: float) -> None:
        nonlocal last
        if time.monotonic() - last > SECONDS_BETWEEN_REPORTS:
            last = time.monotonic()
            connection.send(float(fraction))

    return listen
