"""Attention matrices as pictures."""

from typing import Any

import numpy as np
from jaxtyping import Array, Float

from meanformer.plotting import style


def draw_matrix(
    matrix: Float[Array, "m n"], axes: Any, *, largest: float | None = None
):
    """Draw an attention matrix: a row for each query, a column for each token.

    Args:
        matrix: its entries; negative ones are drawn in the opposite colour.
        axes: where to draw.
        largest: the entry of full colour; the largest one by default.

    Returns:
        The axes.
    """
    from matplotlib.colors import LinearSegmentedColormap

    entries = np.asarray(matrix)
    top = np.abs(entries).max() if largest is None else largest
    colours = LinearSegmentedColormap.from_list(
        "signed", (style.ORANGE, "#f4f4f2", style.BLUE)
    )
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
