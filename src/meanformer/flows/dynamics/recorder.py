"""Base classes of stores and progress bars, and the progress bar of `solve`."""

import abc
from typing import Any

from jaxtyping import Array, Float

from meanformer.flows.trajectories.abstract import AbstractTrajectory


class AbstractRecorder(abc.ABC):
    """Base class of stores that keep a trajectory while it is computed."""

    @abc.abstractmethod
    def begin(
        self,
        depths: Float[Array, " t"],
        request: dict[str, Any],
        empty: AbstractTrajectory,
    ) -> AbstractTrajectory | None:
        """Prepare for these depths; return the trajectory that is there, or `None`.

        Args:
            depths: the depths to come.
            request: what tells one run from another, by the words for it; raise if what
                is there answers another one.
            empty: a trajectory of one depth, of the kind to return, with all that does
                not change along depth. In it and in what is returned `status` has one
                entry for each depth.
        """

    @abc.abstractmethod
    def append(self, index: int, row: AbstractTrajectory) -> None:
        """Keep the depth of this index, so that a crash cannot lose it.

        Args:
            index: which of the depths it is.
            row: a trajectory of this depth alone.
        """

    @abc.abstractmethod
    def end(self) -> None:
        """Let go of the store; called also when the solve was interrupted."""


class AbstractProgress(abc.ABC):
    """Base class of progress bars, which are used as context managers."""

    @abc.abstractmethod
    def update(self, done: int, total: int) -> None:
        """Say how many of the stretches are done."""

    def tell(self, caption: str) -> None:
        """Say how things stand; nothing unless it is shown."""
        return

    def __enter__(self) -> "AbstractProgress":
        return self

    def __exit__(self, *problem) -> None:
        return


class NoProgress(AbstractProgress):
    """A progress bar that shows nothing."""

    def update(self, done: int, total: int) -> None:
        """Do nothing."""


class ProgressBar(AbstractProgress):
    """A bar with an estimate on standard error, silent where that is no terminal."""

    def __init__(self, label: str = "solving"):
        from rich.console import Console
        from rich.progress import Progress

        self._label = label
        console = Console(stderr=True)
        self._bar = Progress(console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task(label, total=None)

    def update(self, done: int, total: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=done, total=total)

    def tell(self, caption: str) -> None:
        """Write beside the bar."""
        self._bar.update(self._task, description=caption or self._label)

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *problem) -> None:
        self._bar.stop()


def bar_for(progress: bool | AbstractProgress) -> AbstractProgress:
    """Return the progress bar that an option `progress` asks for."""
    if isinstance(progress, AbstractProgress):
        return progress
    return ProgressBar() if progress else NoProgress()
