"""Attention matrices: heat maps with leaders marked, graphs of who follows whom."""

from typing import Any

import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import as_integer, check, check_choice
from meanformer.plotting import style
from meanformer.plotting.token_paths import check_dimension, paths_of
from meanformer.typing import ArrayLike

ROOM_FOR_TICKS, ROOM_FOR_COLUMNS = 20, 12
WIDEST_ARROW = 2.6  # points
ROOM_FOR_ARROWS = 8
TIED = 1e-6  # relative; tokens that have met are attended to alike


def draw_matrix(
    matrix: Float[Array, "m n"] | Float[np.ndarray, "m n"],
    axes: Any,
    *,
    largest: float | None = None,
):
    """Draw an attention matrix: a row for each query, a column for each token.

    Args:
        matrix: its entries; negative ones are drawn in the opposite colour.
        axes: where to draw.
        largest: the entry of full colour; the largest one by default.

    Returns:
        The axes.
    """
    entries = np.asarray(matrix)
    top = np.abs(entries).max() if largest is None else largest
    colours = style.colours_through("signed", style.ORANGE, "#f4f4f2", style.BLUE)
    axes.imshow(entries, cmap=colours, vmin=-top, vmax=top)
    if entries.size <= 64:
        for (row, column), entry in np.ndenumerate(entries):
            # Cells are light or dark whatever the page behind them.
            shade = "#ffffff" if abs(entry) > 0.6 * top else "#222222"
            axes.text(
                column, row, f"{entry + 0.0:.2f}".replace("-0.00", "0.00"),
                ha="center", va="center", color=shade, fontsize=8,
            )  # fmt: skip
        for axis, size in ((axes.yaxis, len(entries)), (axes.xaxis, entries.shape[1])):
            axis.set_ticks(range(size), [str(number + 1) for number in range(size)])
    axes.set(xlabel="token $j$", ylabel="query $i$")
    axes.grid(False)
    return axes


def draw_attention(
    matrix: ArrayLike,
    axes: Any,
    *,
    leaders: Any = None,
    order: Any = "leader",
    rank: int | None = None,
    largest: float | None = None,
) -> Any:
    """Draw a self-attention matrix with its leaders marked, followers side by side.

    A triangle above a column marks a leader. Rows are grouped by the leader that they
    attend to most, with a thin line between the groups.

    Args:
        matrix: attention of each query (row) to each token (column), square.
        axes: where to draw.
        leaders: the tokens to mark, counted from zero; by default those that some row
            attends to most.
        order: rows from top to bottom; `"leader"` groups them, `None` leaves them.
        rank: the numerical rank, shown as title; none by default.
        largest: the entry of full colour; the largest one by default.

    Returns:
        The axes.
    """
    entries = np.asarray(matrix, float)
    check(
        entries.ndim == 2 and entries.shape[0] == entries.shape[1] > 0,
        f"the matrix has shape {entries.shape}; it must be square.",
    )
    chosen = _chosen(entries, leaders)
    rows = _row_order(entries, chosen, order)
    draw_matrix(entries[rows], axes, largest=largest)
    if isinstance(order, str):
        followed = _followed(entries, chosen)[rows]
        for place in np.flatnonzero(np.diff(followed)):
            axes.axhline(place + 0.5, color=style.INK, linewidth=0.6, alpha=0.6)
    axes.plot(
        chosen,
        np.full(len(chosen), 1.02),
        "v",
        color=style.ORANGE,
        markersize=6 if len(rows) <= ROOM_FOR_TICKS else 4,
        transform=axes.get_xaxis_transform(),
        clip_on=False,
    )
    shown = rows if len(rows) <= ROOM_FOR_TICKS else []
    axes.set_yticks(range(len(shown)), [str(row + 1) for row in shown])
    columns = np.arange(len(rows)) if len(rows) <= ROOM_FOR_COLUMNS else chosen
    axes.set_xticks(columns, _legible(columns, len(rows)))
    if rank is not None:
        axes.set_title(f"rank {rank}", loc="left", pad=12)
    return axes


def leaders_of(matrix: Any) -> np.ndarray:
    """The tokens that some row attends to most, in order; of equal ones the first."""
    entries = np.asarray(matrix)
    most = entries.max(axis=1, keepdims=True)
    is_most = entries >= most - TIED * np.abs(most)
    return np.unique(is_most.argmax(axis=1))


def draw_leader_graph(
    points: Any,
    matrix: Float[Array, "n n"],
    axes: Any,
    *,
    leaders: Any = None,
    least: float = 0.02,
    numbers: bool = True,
) -> Any:
    """Draw who attends to whom: arrows between tokens of the plane, as wide as heavy.

    An arrow goes from a query to each other token that it gives at least the weight
    `least`; its width and its opacity are the weight. Leaders are larger and orange.

    Args:
        points: tokens of the plane, as a cloud or as rows.
        matrix: attention of each query (row) to each token (column).
        axes: where to draw.
        leaders: the tokens to mark; by default those that some row attends to most.
        least: the smallest weight that is drawn.
        numbers: write the leaders' numbers beside them, from one on.

    Returns:
        The axes.
    """
    paths, entries = paths_of(points), np.asarray(matrix)
    check_dimension(paths.dimension, 2)
    tokens, count = paths.points[-1], len(paths.weights)
    check(
        entries.shape == (count, count),
        f"the matrix has shape {entries.shape} for {count} tokens; it must be square, "
        "with a row for each.",
    )
    chosen = _chosen(entries, leaders)
    widest = WIDEST_ARROW * min(1.0, float(np.sqrt(ROOM_FOR_ARROWS / count)))
    style.set_square(axes, tokens, margin=0.08)
    for query, token in np.argwhere((entries >= least) & ~np.eye(count, dtype=bool)):
        if np.any(tokens[query] != tokens[token]):
            weight = entries[query, token]
            _add_arrow(axes, tokens[query], tokens[token], weight, widest)
    axes.scatter(*tokens.T, s=22, color=style.BLUE, zorder=3, linewidths=0)
    axes.scatter(*tokens[chosen].T, s=70, color=style.ORANGE, zorder=4, linewidths=0)
    for leader in chosen if numbers else []:
        beside = tuple(10 * _outwards(tokens, tokens[leader]))
        options = {"textcoords": "offset points", "ha": "center", "va": "center"}
        options |= {"color": style.ORANGE, "zorder": 5}
        axes.annotate(str(leader + 1), tokens[leader], beside, **options)
    return axes


def _outwards(tokens: np.ndarray, leader: np.ndarray) -> np.ndarray:
    """The direction away from the other tokens, where no arrow arrives."""
    away = leader - tokens.mean(axis=0)
    length = np.linalg.norm(away)
    return away / length if length > 0 else np.array([0.7, 0.7])


def _chosen(entries: np.ndarray, leaders: Any) -> np.ndarray:
    """The leaders named, or found."""
    if leaders is None:
        return leaders_of(entries)
    named = [as_integer("a leader", one, least=0) for one in np.ravel(leaders)]
    check(
        all(one < len(entries) for one in named),
        f"leaders is {named}; tokens are counted from 0 to {len(entries) - 1}.",
    )
    return np.array(named, int)


def _row_order(entries: np.ndarray, chosen: np.ndarray, order: Any) -> np.ndarray:
    count = len(entries)
    if order is None:
        return np.arange(count)
    if isinstance(order, str):
        check_choice("order", order, ("leader",), ", None or a list of rows")
        return np.argsort(_followed(entries, chosen), kind="stable")
    rows = np.asarray(order, int)
    check(
        sorted(rows) == list(range(count)),
        f"order is {list(rows)}; it must name each of the {count} rows once.",
    )
    return rows


def _followed(entries: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The leader that each row attends to most, by its place among the leaders."""
    check(len(chosen) > 0, "leaders is empty; name a token, or leave it out.")
    return entries[:, chosen].argmax(axis=1)


def _legible(columns: np.ndarray, count: int) -> list[str]:
    """The numbers of columns from one on, without those that would overlap."""
    labels, last = [], -count
    for column in columns:
        has_room = column - last >= count / ROOM_FOR_TICKS
        labels.append(str(column + 1) if has_room else "")
        last = column if has_room else last
    return labels


def _add_arrow(axes: Any, start, end, weight: float, widest: float) -> None:
    from matplotlib.patches import FancyArrowPatch

    arrow = FancyArrowPatch(
        start,
        end,
        arrowstyle="-|>",
        connectionstyle="arc3,rad=0.12",
        mutation_scale=4 + 2.5 * widest * weight,
        shrinkA=3,
        shrinkB=5,
        linewidth=max(widest * weight, 0.15),
        color=style.INK,
        alpha=0.25 + 0.6 * min(float(weight), 1.0),
        zorder=2,
    )
    axes.add_patch(arrow)
