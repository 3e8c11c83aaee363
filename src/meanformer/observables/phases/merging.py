"""Starts whose tokens have met become smaller: one token for each group, heavier."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

# Sizes of clouds, as shares of the first one: each is compiled once.
SHARES = (1, 2, 4, 8)
LEAST = 4


class StartGroup(NamedTuple):
    """Starts of one size of cloud, at one depth.

    Attributes:
        states: tokens or Gram matrices.
        numbers: how many tokens have met at each place; zero for none.
        places: which start it is.
        widths: the step that its batch would try next; zero for none yet.
    """

    states: Float[np.ndarray, "b n c"]
    numbers: Float[np.ndarray, "b n"]
    places: Int[np.ndarray, " b"]
    widths: Float[np.ndarray, " b"]

    def taken(self, chosen: np.ndarray) -> "StartGroup":
        """Return some of the starts."""
        return StartGroup(*(array[chosen] for array in self))

    def split(self, size: int) -> list["StartGroup"]:
        """Return batches of at most this size."""
        firsts = range(0, len(self.places), size)
        return [self.taken(np.arange(len(self.places))[i : i + size]) for i in firsts]


def joined(groups: list[StartGroup]) -> list[StartGroup]:
    """Return one group for each size of cloud, the largest first."""
    sizes = sorted({group.numbers.shape[1] for group in groups}, reverse=True)
    return [
        StartGroup(*(np.concatenate(arrays) for arrays in zip(*alike, strict=True)))
        for size in sizes
        if (alike := [group for group in groups if group.numbers.shape[1] == size])
    ]


def shrunk(
    group: StartGroup, together: Bool[np.ndarray, "b n n"], *, count: int, is_gram: bool
) -> list[StartGroup]:
    """Replace tokens that have met by one, where a smaller size of cloud is enough.

    Args:
        group: the starts.
        together: which tokens have met.
        count: number of tokens at the start.
        is_gram: whether the states are Gram matrices.

    Returns:
        The starts, in groups of different sizes.
    """
    leaders = leaders_of(together, group.numbers > 0)
    left = np.sum(leaders == np.arange(leaders.shape[1])[None, :], axis=1)
    left -= np.sum(group.numbers == 0, axis=1)
    own = group.numbers.shape[1]
    sizes = np.array([max(LEAST, -(-count // share)) for share in SHARES])
    needed = np.array([min(own, sizes[sizes >= number].min()) for number in left])
    parts = []
    for size in np.unique(needed).tolist():
        chosen = np.flatnonzero(needed == size)
        part = group.taken(chosen)
        parts.append(
            part if size == own else _merged(part, leaders[chosen], size, is_gram)
        )
    return parts


def leaders_of(
    together: Bool[np.ndarray, "b n n"], present: Bool[np.ndarray, "b n"]
) -> Int[np.ndarray, "b n"]:
    """Return for each token the first leader that it has met, perhaps itself.

    Absent tokens are their own leaders.
    """
    number, count = present.shape
    leaders = np.tile(np.arange(count), (number, 1))
    is_leader = np.zeros((number, count), bool)
    for token in range(count):
        met = together[:, token, :] & is_leader & present[:, token, None]
        follows = met.any(axis=1)
        leaders[follows, token] = met[follows].argmax(axis=1)
        is_leader[:, token] = present[:, token] & ~follows
    return leaders


def _merged(
    group: StartGroup, leaders: np.ndarray, size: int, is_gram: bool
) -> StartGroup:
    """Return clouds of this size, with the mean direction of each group."""
    count = leaders.shape[1]
    is_leader = (leaders == np.arange(count)[None, :]) & (group.numbers > 0)
    slots = np.take_along_axis(np.cumsum(is_leader, axis=1) - 1, leaders, axis=1)
    members = slots[:, None, :] == np.arange(size)[None, :, None]
    shares = members * group.numbers[:, None, :]
    numbers = shares.sum(axis=2)
    # A place that stays empty holds a copy of the first token.
    filled = np.where(numbers[:, :, None] > 0, shares, shares[:, :1])
    sums = filled @ group.states
    if is_gram:
        sums = sums @ np.swapaxes(filled, 1, 2)
        norms = np.sqrt(np.einsum("bii->bi", sums))
        states = sums / (norms[:, :, None] * norms[:, None, :])
    else:
        states = sums / np.linalg.norm(sums, axis=2, keepdims=True)
    return StartGroup(states, numbers, group.places, group.widths)
