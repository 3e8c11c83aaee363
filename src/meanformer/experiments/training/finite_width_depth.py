r"""How many layers and heads are enough: depth averages heads like width does.

Transformers of $L$ layers of $M$ averaged heads tend to a flow of measures. Heads that
are the same at every layer leave the error of Euler steps, $O(1/L)$. Heads drawn anew
for every layer leave $O(1/L + 1/\sqrt{LM})$: a single head will do if there are many
layers, before training and after a fixed time of it. The limit of random heads with
values of mean zero is known: nothing moves. Contexts of random tokens leave $n^{-1/2}$.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers import fitting
from meanformer.experiments.helpers.rates import exponent
from meanformer.plotting import draw_rate, draw_slope, mark_sizes, style
from meanformer.training import Dataset, MeanFieldTransformer, gradient, outputs

# The largest network is the reference, with four times as many heads as any other.
LAYERS, HEADS = (4, 16, 64), (1, 2, 8)
_, *SIZES, LARGEST = [(deep, wide) for deep in LAYERS for wide in HEADS]
PRODUCTS = np.prod(SIZES, axis=1)
SMOOTH, FINE = (4, 8, 16), (32, 64)
STEP, STEPS = 0.25, 4
TOKENS, MANY = (8, 32, 128), 512


class Parameters(lab.Parameters):
    """How often networks and contexts are drawn."""

    draws: int = lab.setting(24, full=128, help="networks of each size", at_least=16)
    seed: int = lab.setting(0, help="seed of all draws", at_least=0)


START, TRAINED = "at the start", f"after {STEPS} gradient steps"
RATE = lab.theory("the rate")
BOTH = f"{START} and {TRAINED}"
IN_DEPTH = lab.theorem(
    "same-heads",
    f"With the same heads at every layer the error of outputs is $O(1/L)$, {BOTH}.",
    "SAP22, residual networks and their continuous limit; Chi25",
    source=RATE,
)
ANEW = lab.observation(
    "heads-anew",
    r"With heads drawn anew for every layer it is $O(1/\sqrt{LM})$: from the identity "
    f"{START}, from the limit of training {TRAINED}.",
    "Chi25, residual networks; BHFP26",
    source=RATE,
)
LOSSES = lab.observation(
    "losses",
    f"So is that of the losses of single contexts, {BOTH}.",
    "Chi25, residual networks",
    source=RATE,
)
ASPECT = lab.observation(
    "aspect",
    r"The mean error times $\sqrt{LM}$ is the same for deep and for wide networks, "
    "up to a factor of $1.6$.",
    "Chi25, hidden width of deep networks",
    source=lab.theory("its largest value over its smallest one"),
)
CONTEXT = lab.theorem(
    "context",
    "For contexts of $n$ random tokens the error of outputs is $O(n^{-1/2})$.",
    "CLLR26, propagation of chaos in transformers",
    source=RATE,
)


@lab.experiment("How many layers and heads are enough", room="training", seconds=9)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Train networks of many sizes, and compare them with the largest."""
    random = np.random.default_rng(parameters.seed)
    draws, data = parameters.draws, fitting.examples()

    def heads(*size):
        return random.normal(size=(draws, 3, *size, 2, 2))

    same = heads(1, max(HEADS))
    by_depth = {
        deep: trained(np.repeat(same, deep, axis=2), data)
        for deep in progress.over([*SMOOTH, *FINE], 0.3)
    }
    by_size = {
        one: trained(heads(*one), data) for one in progress.over([*SIZES, LARGEST], 0.6)
    }
    in_depth, (off, losses_off) = depth_errors(by_depth), size_errors(by_size, data)
    contexts = context_errors(random, 2 * draws)
    found = {
        IN_DEPTH: [exponent(SMOOTH, errors) for errors in in_depth],
        ANEW: [exponent(PRODUCTS, errors) for errors in off],
        LOSSES: [exponent(PRODUCTS, errors) for errors in losses_off],
        CONTEXT: [exponent(TOKENS, contexts)],
    }
    wanted = dict.fromkeys(found, -0.5) | {IN_DEPTH: -1.0}
    findings = [
        claim.close_to([slope for slope, _ in pairs], wanted[claim], tolerance=0.15)
        for claim, pairs in found.items()
    ]
    constants = np.array([errors.mean(axis=1) * np.sqrt(PRODUCTS) for errors in off])
    findings += [ASPECT.at_most(constants.max(axis=1) / constants.min(axis=1), 1.6)]
    pictures = [draw_errors(in_depth, off, contexts)]
    return lab.Outcome(findings, pictures, [slope_table(found)])


def trained(heads, data: Dataset):
    """Outputs of networks, before gradient steps and after each.

    Repeated heads and layers of length zero change nothing: with them all sizes are one
    compiled program.
    """
    deep, wide = heads.shape[2:4]
    heads = np.repeat(heads, max(HEADS) // wide, axis=3)
    missing = [(0, max(LAYERS) - deep if axis == 2 else 0) for axis in range(6)]
    depths = np.minimum(np.arange(max(LAYERS) + 1) / deep, 1)
    return np.asarray(stepped(np.pad(heads, missing), depths, data))


@eqx.filter_jit
def stepped(heads, depths, data: Dataset):
    """Outputs before each step, for each of many draws of heads."""
    has_length = (jnp.diff(depths) > 0)[:, None, None, None]

    def of_one(heads):
        model = MeanFieldTransformer(*heads, depths=depths)

        def moved(head, change):
            # Of layers without length the gradient is 0/0.
            return head - STEP * jnp.where(has_length, change, 0)

        def step(heads, _):
            there = model.with_parameters(heads)
            found = gradient(there, data).parameters
            return jax.tree.map(moved, heads, found), outputs(there, data)[:, 0]

        return jax.lax.scan(step, model.parameters, None, length=STEPS + 1)[1]

    return jax.vmap(of_one)(heads)


def lengths(gaps) -> np.ndarray:
    """The root mean square over contexts and coordinates."""
    return np.sqrt(np.mean(np.asarray(gaps) ** 2, axis=(-2, -1)))


def depth_errors(by_depth: dict) -> list[np.ndarray]:
    """Errors of outputs by depth and draw, from a limit extrapolated for each draw."""
    coarse, fine = (by_depth[deep] for deep in FINE)
    errors = lengths([by_depth[deep] - (2 * fine - coarse) for deep in SMOOTH])
    return [errors[:, :, 0], errors[:, :, -1]]


def size_errors(by_size: dict, data: Dataset) -> list[list[np.ndarray]]:
    """Errors of outputs and of losses by size and draw, before and after training."""
    still, targets = (np.asarray(one)[:, 0] for one in (data.queries, data.targets))

    def losses(ends):
        return np.sum((ends - targets) ** 2, axis=-1, keepdims=True) / 2

    def errors(function):
        values = {size: function(ends) for size, ends in by_size.items()}
        # Values have mean zero, so that nothing moves in the limit before training.
        limits = {0: function(still), -1: values[LARGEST][:, -1].mean(axis=0)}
        for time, limit in limits.items():
            yield lengths([values[size][:, time] - limit for size in SIZES])

    return [list(errors(function)) for function in (np.asarray, losses)]


def context_errors(random, draws: int) -> np.ndarray:
    """Errors of one network by number of tokens and draw, against many tokens."""
    model = MeanFieldTransformer(*random.normal(size=(3, 4, 2, 2, 2)) / 2)
    queries = np.broadcast_to(np.eye(2), (len(TOKENS) * draws, 2, 2))

    def tokens(count):
        return random.normal(size=(draws, count, 2)) / 2

    limit = outputs(model, Dataset(tokens(MANY), queries[:draws])).mean(axis=0)
    clouds = [mf.TokenCloud(one) for count in TOKENS for one in tokens(count)]
    ends = np.asarray(outputs(model, Dataset(clouds, queries)))
    return lengths(ends - np.asarray(limit)).reshape(len(TOKENS), draws)


def slope_table(found: dict) -> lab.Table:
    """Fitted exponents with their confidence intervals."""
    rows = [
        (claim.id, time, slope, slope - 2 * error, slope + 2 * error)
        for claim, slopes in found.items()
        for time, (slope, error) in zip((START, TRAINED), slopes, strict=False)
    ]
    names = ("errors", "when", "exponent", "from", "to")
    return lab.Table(names, rows, "Fitted exponents, with two standard errors about.")


def draw_errors(in_depth, off, contexts) -> lab.Picture:
    """Errors of outputs by depth, by the number of heads in all, and by tokens."""
    figure, (left, middle, right) = style.canvas(3, panel=(3.8, 3.7))
    colours = {START: style.BLUE, TRAINED: style.ORANGE}
    for errors, label in zip(in_depth, colours, strict=True):
        draw_rate(SMOOTH, errors.mean(axis=1), left, label=label, slope=-1)
    mark_sizes(SMOOTH, left)
    left.set(xlabel="layers $L$", ylabel="error of outputs", title="the same heads")
    left.legend()
    for errors, colour in zip(off, colours.values(), strict=True):
        means = errors.mean(axis=1)
        for deep, mark in zip(LAYERS, "os^", strict=True):
            here = [index for index, size in enumerate(SIZES) if size[0] == deep]
            name = f"$L = {deep}$" if colour == style.ORANGE else None
            middle.plot(PRODUCTS[here], means[here], mark, color=colour, label=name)
        last = np.mean(means * np.sqrt(PRODUCTS / PRODUCTS.max()))
        draw_slope(np.sort(PRODUCTS), last, -0.5, middle, color=colour)
    middle.set(xscale="log", yscale="log", xlabel="heads in all, $LM$")
    middle.set_title("heads drawn anew")
    mark_sizes(np.unique(PRODUCTS), middle)
    middle.legend()
    draw_rate(TOKENS, contexts.mean(axis=1), right, label="outputs", slope=-0.5)
    mark_sizes(TOKENS, right)
    right.set(xlabel="tokens $n$", title="random contexts")
    return lab.Picture(
        figure,
        f"Mean errors of outputs, {START} (blue) and {TRAINED} (orange). Dashed: "
        r"slopes $-1$, $-\frac12$ and $-\frac12$.",
    )
