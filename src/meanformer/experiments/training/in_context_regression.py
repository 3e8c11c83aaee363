r"""A layer of linear attention learns one step of gradient descent, in its context.

A context holds examples $(x_i, y_i)$ with $y_i = \langle w, x_i\rangle +
\sigma\varepsilon_i$ for a $w$ of its own, and the query $(x, 0)$ asks for $\langle w,
x\rangle$. One layer of linear attention predicts $\langle x, P\,\tfrac1n\sum_i
y_ix_i\rangle$, which is a step of gradient descent from $w = 0$ with a preconditioner
$P$. The best $P$ and its risk have a closed form for normal $w$ and $x$, and a layer
that is trained finds them. With softmax in place of linear weights it is a kernel
smoother; layers on top of each other make one step after the other.
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer import training
from meanformer.experiments.helpers.regression import gradient_descent, ridge
from meanformer.plotting import draw_curves, mark_values, style
from meanformer.training import tasks

DIMENSION, SIZES = 5, (10, 20, 40)
COVARIANCE, NOISE, EXAMPLES, BETA = (2.0, 1.0, 0.3), 0.5, 12, 2.0
TRAINED_ON, HEADS = 20, 4  # examples in a context, heads of the layer


@dataclass(frozen=True)
class Parameters:
    """How many contexts, and how long the layer is trained."""

    contexts: int = lab.setting(
        20_000, full=1_000_000, help="contexts for risks and regressions", at_least=1000
    )
    batch: int = lab.setting(256, full=4096, help="new contexts in a step", at_least=16)
    steps: int = lab.setting(300, full=2000, help="steps of training", at_least=20)
    rate: float = lab.setting(0.02, help="step at first, in mean-field units", above=0)
    seed: int = lab.setting(0, help="seed of all that is random", at_least=0)


ERRORS = lab.closed_form("largest difference, in standard errors")

STEP = lab.observation(
    "optimal-step",
    r"The best step of many contexts is $\eta^* = n/(n+d+1)$, at $d = 5$ and "
    "$n = 10, 20, 40$.",
    source=ERRORS,
)
RISK = lab.observation(
    "optimal-risk", "The risk of this step is $d(d+1)/(n+d+1)$.", source=ERRORS
)
GENERAL = lab.observation(
    "preconditioner",
    r"With $\Sigma = \operatorname{diag}(2, 1, 0.3)$, $n = 12$ and $\sigma = 0.5$ the "
    r"best matrix is the inverse of $(1+\tfrac1n)\Sigma + "
    r"\tfrac1n(\operatorname{tr}\Sigma+\sigma^2)I$.",
    source=ERRORS,
)
LAYERS = lab.observation(
    "layers",
    "One and four layers of linear attention are steps of gradient descent.",
    source=lab.other_method("gradient descent on each context"),
)
SMOOTHING = lab.observation(
    "kernel-smoothing",
    r"With softmax a layer smooths labels, with the kernel "
    r"$e^{\beta\langle x, x_i\rangle}$.",
    source=lab.other_method("kernel smoothing of each context, in NumPy"),
)
LEARNED = lab.observation(
    "learned-risk",
    r"A layer trained on contexts of 20 examples has a risk at most $5\%$ above the "
    "least.",
    source=lab.closed_form("$1.05$ times $d(d+1)/(n+d+1)$"),
)
MATRIX = lab.observation(
    "learned-matrix",
    r"The matrix that it has learned is within $5\%$ of $\eta^*I$.",
    source=lab.closed_form(r"relative distance in the Frobenius norm"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Compare formulas with many contexts, then train a layer."""
    key_drawn, key_general, key_train = jr.split(jr.key(parameters.seed), 3)
    most, _ = tasks.linear_regression(
        parameters.contexts, SIZES[-1], DIMENSION, key=key_drawn
    )
    drawn = [first_examples(most, size) for size in SIZES]
    general = tasks.linear_regression(
        parameters.contexts,
        EXAMPLES,
        len(COVARIANCE),
        key=key_general,
        noise=NOISE,
        covariance=np.diag(COVARIANCE),
    )
    measured = [risks_of(*one) for one in progress.over(drawn, 0.4)]
    one, four, smoother = exact_layers(drawn[1][0].some(slice(0, 200)))
    known, (history, model) = drawn[1][1], train(parameters, key_train)
    learned = np.asarray(tasks.effective_matrix(model))
    best = float(known.optimal_step) * np.eye(DIMENSION)
    reached = training.risk(model, drawn[1][0], loss=tasks.prediction_error)
    distance = np.linalg.norm(learned - best) / np.linalg.norm(best)
    return lab.Outcome(
        findings=[
            STEP.at_most([step_error(*one) for one in drawn], 5.0),
            RISK.at_most([one.pop("error") for one in measured], 5.0),
            GENERAL.at_most(step_error(*general), 5.0),
            LAYERS.close_to(*np.transpose([one, four]), relative_tolerance=1e-10),
            SMOOTHING.close_to(*smoother, relative_tolerance=1e-10),
            LEARNED.at_most(reached, 1.05 * float(known.optimal_risk)),
            MATRIX.at_most(distance, 0.05),
        ],
        pictures=[draw(measured, history, known)],
    )


def first_examples(data, count: int):
    """The contexts with their first examples alone, and what is known of them."""
    tokens = data.tokens[:, :count]
    weights = jnp.full(tokens.shape[:2], 1 / count)
    fewer = eqx.tree_at(lambda d: (d.tokens, d.weights), data, (tokens, weights))
    return fewer, tasks.LinearRegression(count, jnp.eye(DIMENSION), 0.0)


def moments(data) -> tuple[np.ndarray, np.ndarray]:
    r"""Queries without their label, and $\tfrac1n\sum_iy_ix_i$, of all contexts."""
    tokens = np.asarray(data.tokens)
    sums = np.einsum("kn,knd->kd", tokens[..., -1], tokens[..., :-1])
    return np.asarray(data.queries[:, 0, :-1]), sums / tokens.shape[1]


def step_error(data, task) -> float:
    """How far the regression of targets on moments is from the formula.

    In standard errors, the largest entry; a multiple of the identity is regressed where
    the formula is one.
    """
    queries, sums = moments(data)
    features = queries[:, :, None] * sums[:, None, :]
    expected = np.asarray(task.preconditioner)
    if len(expected) == DIMENSION:
        features = np.trace(features, axis1=1, axis2=2)[:, None]
        expected = np.asarray(task.optimal_step)[None]
    features = features.reshape(len(features), -1)
    inverse = np.linalg.inv(features.T @ features)
    found = inverse @ (features.T @ np.asarray(data.targets))
    scores = (np.asarray(data.targets) - features @ found)[:, None] * features
    spread = np.sqrt(np.diag(inverse @ (scores.T @ scores) @ inverse))
    return float(np.max(np.abs(found - expected.ravel()) / spread))


def risks_of(data, task) -> dict[str, float]:
    """Mean squares of errors of the best step, and of what one may do instead."""
    queries, sums = moments(data)
    predicted = float(task.optimal_step) * np.sum(queries * sums, axis=1)
    squares = (predicted - np.asarray(data.targets)) ** 2
    spread, few = squares.std() / np.sqrt(len(squares)), data.some(slice(0, 1000))
    step = task.optimal_step * np.eye(DIMENSION)
    three = gradient_descent(few, step, steps=3) - few.targets
    return {
        "error": abs(squares.mean() - float(task.optimal_risk)) / spread,
        "one step": squares.mean(),
        "three steps": float(jnp.mean(three**2)),
        "least squares": float(jnp.mean((ridge(few) - few.targets) ** 2)),
    }


def exact_layers(data) -> np.ndarray:
    """Risks of one and four linear layers and of a smoother; and of what they are."""
    identity, tokens = np.eye(DIMENSION), np.asarray(data.tokens)
    queries, targets = np.asarray(data.queries)[:, 0, :-1], np.asarray(data.targets)
    kernel = np.exp(BETA * np.einsum("knd,kd->kn", tokens[..., :-1], queries))
    smooth = (kernel * tokens[..., -1]).sum(1) / kernel.sum(1)
    pairs = [(tasks.regression_layers(identity, kind=mf.Softmax, beta=BETA), smooth)]
    for count in (4, 1):
        model = tasks.regression_layers(identity / 2, steps=count)
        steps = gradient_descent(data, identity / 2, steps=count)
        pairs.insert(0, (model, steps))
    risks = [training.risk(m, data, loss=tasks.prediction_error) for m, _ in pairs]
    return np.array([risks, [np.mean((p - targets) ** 2) for _, p in pairs]]).T


def train(parameters: Parameters, key):
    """A layer that follows the gradient on new contexts."""
    key, key_start = jr.split(key)
    start = training.MeanFieldTransformer.draw(
        1, HEADS, DIMENSION + 1, key=key_start, kind=mf.Linear
    )
    start = start.with_parameters(jax.tree.map(lambda a: a / 2, start.parameters))

    @jax.jit
    def follow(heads, keys, rates):
        def one(heads, given):
            key, rate = given
            data, _ = tasks.linear_regression(
                parameters.batch, TRAINED_ON, DIMENSION, key=key
            )
            model = start.with_parameters(heads)
            found = training.gradient(model, data, loss=tasks.prediction_error)
            moved = jax.tree.map(lambda a, g: a - rate * g, heads, found.parameters)
            return moved, found.risk

        return jax.lax.scan(one, heads, (keys, rates))

    # Full steps at first; then shorter ones, which forget the noise of the contexts.
    left = 1 - jnp.arange(parameters.steps) / parameters.steps
    rates = parameters.rate * jnp.minimum(1, 2 * left)
    keys = jr.split(key, parameters.steps)
    heads, risks = follow(start.parameters, keys, rates)
    return np.asarray(risks), start.with_parameters(heads)


def draw(measured, history, known) -> lab.Picture:
    """Risks against the number of examples, and the risk in each step of training."""
    figure, (left, right) = style.canvas(2, panel=(4.2, 3.4))
    sizes = np.arange(SIZES[0], SIZES[-1] + 1)
    formula = DIMENSION * (DIMENSION + 1) / (sizes + DIMENSION + 1)
    left.plot(sizes, formula, color=style.BLUE, label="one step, formula")
    draw_curves(
        SIZES,
        {name: [one[name] for one in measured] for name in measured[0]},
        left,
        marks=["o", "^--", "v--"],
        colours=[style.BLUE, style.GREEN, style.ORANGE],
        xlabel="examples $n$",
        ylabel="risk",
    )
    right.semilogy(history, color=style.BLUE, linewidth=0.8, label="training")
    mark_values(known.optimal_risk, right, axis="y", label="least risk of one step")
    right.set(xlabel="steps", ylabel="risk on new contexts")
    right.legend()
    return lab.Picture(
        figure,
        "Left: the mean square of errors of a step of gradient descent, the best that "
        "one layer of linear attention can do, and of others; zero has the risk 5, and "
        "least squares, without noise, none. Right: four heads in training.",
    )


experiment = lab.experiment(
    run, "A layer learns a step of gradient descent", room="training", seconds=9
)
