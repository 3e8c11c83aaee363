"""Report how far a run has come, without printing."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


class Progress:
    """Fraction of a run that is done, reported to whoever listens.

    Loops may be nested; each takes its share of the loop around it:

        for kind in progress.over(kinds):           # all of the run
            for trial in progress.over(range(10)):  # all of one kind
                ...

    Two loops one after the other say how large they are: `over(a, share=0.7)`,
    then `over(b, share=0.3)`.
    """

    def __init__(self, listener: Callable[[float], None] = lambda fraction: None):
        self._listener = listener
        self._done = 0.0
        self._width = 1.0

    @property
    def fraction(self) -> float:
        """Between 0 at the start and 1 at the end."""
        return min(self._done, 1.0)

    def over(self, items: Iterable[Item], share: float = 1.0) -> Iterator[Item]:
        """Go through the items, moving forward by the share that they make up."""
        items = list(items)
        start, width = self._done, self._width * share
        for index, item in enumerate(items):
            outer, self._width = self._width, width / len(items)
            try:
                yield item
            finally:
                self._width = outer
            self._done = start + width * (index + 1) / len(items)
            self._listener(self.fraction)
