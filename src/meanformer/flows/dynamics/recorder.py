"""What a solve reports to while it runs: a store for its states, a progress bar."""

import abc
from collections.abc import Sequence

from jaxtyping import Array, Float

from meanformer.flows.dynamics.state import State
from meanformer.flows.dynamics.tokens import Problem

Snapshot = tuple[State, Float[Array, "n d"]]


class AbstractRecorder(abc.ABC):
    """Something that keeps the states of a solve as they are computed."""

    @abc.abstractmethod
    def begin(
        self, depths: Float[Array, " t"], problem: Problem, start: State
    ) -> Sequence[Snapshot]:
        """Prepare for these depths; return the snapshots that are there already.

        Raise if they belong to another problem or start.
        """

    @abc.abstractmethod
    def append(self, index: int, state: State, velocities: Float[Array, "n d"]) -> None:
        """Keep the state at the depth of this index, so that a crash cannot lose it."""

    @abc.abstractmethod
    def end(self) -> None:
        """Let go of the store; called also when the solve was interrupted."""


class AbstractProgress(abc.ABC):
    """Something that shows how far a solve has come; used as a context manager."""

    @abc.abstractmethod
    def update(self, done: int, total: int) -> None:
        """Say how many of the stretches are done."""

    def __enter__(self) -> "AbstractProgress":
        return self

    def __exit__(self, *problem) -> None:
        return


class NoProgress(AbstractProgress):
    """Shows nothing."""

    def update(self, done: int, total: int) -> None:
        """Do nothing."""


class ProgressBar(AbstractProgress):
    """A bar with an estimate on standard error, silent where that is no terminal."""

    def __init__(self, label: str = "solving"):
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._bar = Progress(console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task(label, total=None)

    def update(self, done: int, total: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=done, total=total)

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *problem) -> None:
        self._bar.stop()


def bar_for(progress: bool | AbstractProgress) -> AbstractProgress:
    """Return what to report to."""
    if isinstance(progress, AbstractProgress):
        return progress
    return ProgressBar() if progress else NoProgress()
