"""Phase diagrams on the sphere, against solves of single starts and closed forms."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.integrate

import meanformer as mf
from meanformer.errors import InvalidInput, PrecisionWarning
from meanformer.observables import (
    Equiangular,
    count_clusters,
    phase_curve,
    phase_diagram,
    span_dimension,
)
from meanformer.observables.phases import batches
from meanformer.observables.phases.batches import StartGroup, leaders_of, shrunk
from meanformer.observables.phases.motions import (
    IdentityAttention,
    gram_matrices,
    reduced_tokens,
    unit_tokens,
    velocities,
)
from meanformer.observables.phases.quantities import (
    ClosePairs,
    components,
    packed_pairs,
)
from meanformer.observables.phases.stepping import Course, begun, continued

# Clouds of the same shape, at as many depths, share their compiled program.
DEPTHS = np.linspace(0, 8, 33)


def on_sphere(seed, starts=4, count=8, dimension=3):
    drawn = np.random.default_rng(seed).standard_normal((starts, count, dimension))
    return drawn / np.linalg.norm(drawn, axis=2, keepdims=True)


def equal(points):
    """Equal weights."""
    return jnp.full(points.shape[:2], 1 / points.shape[1])


def fractions(points, level):
    """The fraction of close pairs of each of several clouds, in NumPy."""
    count = points.shape[-2]
    gram = np.einsum("...ic,...jc->...ij", points, points)
    above = np.sum(gram > level, axis=(-1, -2)) - count
    return above / (count * (count - 1))


def solved(start, beta, depths, kind="softmax"):
    """Tokens of one start along depth, by the general solver."""
    attention = mf.identity_attention(kind, start.shape[1], beta)
    flow = mf.Flow(attention, space=mf.Sphere())
    path = mf.solve(
        flow, mf.TokenCloud(start), depths[-1], save=depths, rtol=1e-10, atol=1e-12
    )
    return np.asarray(path.points)


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
def test_velocities_are_those_of_the_flow(kind, key):
    points = jnp.asarray(on_sphere(0, 3, 5, 4))
    beta = jnp.asarray(2.0)
    found = velocities(points, equal(points), beta, is_softmax=kind == "softmax")
    attention = mf.identity_attention(kind, 4, 2.0)
    for cloud, rates in zip(points, found, strict=True):
        exact = mf.Sphere().project(cloud, attention(mf.TokenCloud(cloud), cloud))
        np.testing.assert_allclose(rates, exact, atol=1e-13)


def test_velocities_of_the_specified_tokens_have_their_digits():
    points = jnp.array([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [0.6, 0.8, 0]])[None]
    softmax = velocities(points, equal(points), jnp.asarray(2.0), is_softmax=True)[0]
    kernel = velocities(points, equal(points), jnp.asarray(2.0), is_softmax=False)[0]
    np.testing.assert_allclose(
        softmax,
        [
            [0, 0.287673598586, 0.078683325681],
            [0.276934523740, 0, 0.069724852024],
            [0.154008216412, 0.173259243463, 0],
            [-0.015158901622, 0.011369176216, 0.060016064694],
        ],
        atol=1e-11,
    )
    np.testing.assert_allclose(
        kernel,
        [
            [0, 0.914023384547, 0.25],
            [0.992954863659, 0, 0.25],
            [0.4, 0.45, 0],
            [-0.063145183290, 0.047358887467, 0.25],
        ],
        atol=1e-11,
    )


@pytest.mark.parametrize("is_softmax", [True, False])
def test_gram_matrices_move_as_their_tokens_do(is_softmax):
    points = jnp.asarray(on_sphere(1, 2, 6, 9))
    beta = jnp.asarray(3.0)
    rates = velocities(points, equal(points), beta, is_softmax=is_softmax)
    half = gram_matrices(rates, points)
    exact = half + jnp.swapaxes(half, 1, 2)
    gram = gram_matrices(points, points)
    kind = {"is_softmax": is_softmax, "is_gram": True}
    found = velocities(gram, equal(points), beta, **kind)
    np.testing.assert_allclose(found, exact, atol=1e-13)


def test_velocities_do_not_see_the_norms():
    points = jnp.asarray(on_sphere(2, 2, 5, 3))
    exact = velocities(points, equal(points), jnp.asarray(4.0), is_softmax=True)
    norms = jnp.linspace(0.5, 2.0, 5)[None, :, None]
    found = velocities(norms * points, equal(points), jnp.asarray(4.0), is_softmax=True)
    np.testing.assert_allclose(found, exact, atol=1e-14)


@pytest.mark.parametrize("count", [2, 3, 6, 7])
def test_packed_pairs_are_the_upper_triangle(count):
    gram = np.random.default_rng(count).standard_normal((1, count, count))
    gram = gram + np.swapaxes(gram, 1, 2)
    packed = np.sort(np.asarray(packed_pairs(jnp.asarray(gram))).ravel())
    upper = gram[0][np.triu_indices(count, 1)]
    filled = np.full(packed.size - upper.size, -1.0)
    np.testing.assert_array_equal(packed, np.sort(np.concatenate([upper, filled])))


def test_components_of_a_chain_of_a_ring_and_of_no_links_are_counted():
    chain = np.eye(7, k=1) + np.eye(7, k=-1)
    apart = chain.copy()
    apart[2, 3] = apart[3, 2] = 0
    graphs = jnp.asarray(np.stack([chain, apart, np.zeros((7, 7)), np.ones((7, 7))]))
    np.testing.assert_array_equal(components(graphs), [1, 2, 7, 1])


def test_coordinates_in_the_span_keep_all_inner_products():
    points = jnp.asarray(on_sphere(3, 4, 5, 20))
    short = reduced_tokens(points)
    assert short.shape == (4, 5, 5)
    np.testing.assert_allclose(
        gram_matrices(short, short), gram_matrices(points, points), atol=1e-13
    )


@pytest.mark.parametrize(
    ("dimension", "kind", "beta"),
    [
        (3, "softmax", 4.0),
        pytest.param(12, "softmax", 4.0, marks=pytest.mark.slow),
        pytest.param(3, "unnormalised", 1.0, marks=pytest.mark.slow),
    ],
)
def test_fractions_are_those_of_the_general_solver(dimension, kind, beta, key):
    starts = on_sphere(4, dimension=dimension)
    options = {"betas": [beta], "depths": DEPTHS, "kind": kind, "level": 0.99}
    found = phase_diagram(starts=starts, tolerance=1e-9, workers=1, key=key, **options)
    exact = np.mean(
        [fractions(solved(start, beta, DEPTHS, kind), 0.99) for start in starts], axis=0
    )
    np.testing.assert_allclose(found.mean[0], exact, atol=1e-12)


@pytest.mark.slow
def test_the_default_tolerance_moves_few_pairs_across_the_level(key):
    starts = on_sphere(5, 16, 16)
    betas = [0.5, 4.0, 8.0]
    options = {"betas": betas, "depths": DEPTHS, "starts": starts, "key": key}
    exact = phase_diagram(tolerance=1e-9, **options).mean
    assert np.abs(phase_diagram(**options).mean - exact).max() < 1e-2
    single = phase_diagram(dtype="float32", **options).mean
    assert np.abs(single - exact).max() < 1e-2


def test_a_dense_integration_by_scipy_agrees(key):
    starts, beta = on_sphere(6), 3.0

    def velocity(_, flat):
        tokens = flat.reshape(starts.shape)
        gram = tokens @ np.swapaxes(tokens, 1, 2)
        weights = np.exp(beta * gram)
        pulls = weights @ tokens / weights.sum(axis=2, keepdims=True)
        return (pulls - np.sum(pulls * tokens, axis=2, keepdims=True) * tokens).ravel()

    path = scipy.integrate.solve_ivp(
        velocity, (0, 8), starts.ravel(), "DOP853", DEPTHS, rtol=1e-11, atol=1e-13
    )
    points = path.y.T.reshape(-1, *starts.shape)
    exact = fractions(points, 0.999).mean(axis=1)
    found = phase_diagram(
        betas=[beta], depths=DEPTHS, starts=starts, tolerance=1e-9, key=key
    )
    np.testing.assert_allclose(found.mean[0], exact, atol=1e-12)


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
@pytest.mark.parametrize("beta", [0.0, 1.0, 5.0])
def test_orthonormal_tokens_cluster_at_the_depth_of_the_integral(kind, beta, key):
    exact = Equiangular(16, beta, kind=kind).time_to(0.999)
    depths = exact * np.array([0.999, 1.001])
    found = phase_diagram(
        betas=[beta],
        depths=depths,
        starts=np.eye(16)[None],
        kind=kind,
        tolerance=1e-7,
        key=key,
    )
    np.testing.assert_array_equal(found.mean, [[0.0, 1.0]])


@pytest.mark.parametrize(("beta", "exact"), [(1.0, 5.2702839076), (5.0, 9.5443292035)])
def test_thirty_two_orthonormal_tokens_cluster_at_the_specified_depth(beta, exact, key):
    found = phase_diagram(
        betas=[beta],
        depths=[exact - 2e-6, exact + 2e-6],
        starts=np.eye(32)[None],
        tolerance=1e-9,
        key=key,
    )
    np.testing.assert_array_equal(found.mean, [[0.0, 1.0]])


def test_two_tokens_on_the_circle_close_their_angle_in_closed_form(key):
    # At beta = 0 each moves by sin(angle) / 2: tan(angle / 2) decays like exp(-t).
    angle, level = 2.5, 0.9
    depth = np.log(np.tan(angle / 2) / np.tan(np.arccos(level) / 2))
    starts = np.array([[[1.0, 0.0], [np.cos(angle), np.sin(angle)]]])
    found = phase_diagram(
        betas=[0.0],
        depths=[depth - 1e-6, depth + 1e-6],
        starts=starts,
        level=level,
        tolerance=1e-10,
        key=key,
    )
    np.testing.assert_array_equal(found.mean, [[0.0, 1.0]])


def test_rotations_and_the_order_of_tokens_change_nothing(key):
    starts = on_sphere(7)
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]
    options = {"betas": [3.0], "depths": DEPTHS, "tolerance": 1e-9, "key": key}
    found = phase_diagram(starts=starts, **options)
    turned = phase_diagram(starts=starts[:, ::-1] @ turn, **options)
    np.testing.assert_allclose(turned.mean, found.mean, atol=1e-12)


def test_a_turned_frame_in_more_dimensions_changes_nothing(key):
    starts = on_sphere(8)
    wide = np.concatenate([starts, np.zeros((4, 8, 9))], axis=2)
    options = {"betas": [2.0], "depths": DEPTHS, "tolerance": 1e-9, "key": key}
    np.testing.assert_allclose(
        phase_diagram(starts=wide, **options).mean,
        phase_diagram(starts=starts, **options).mean,
        atol=1e-12,
    )


@pytest.mark.parametrize("dimension", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_clusters_are_those_of_single_linkage(dimension, key):
    starts, beta, depths = on_sphere(9, dimension=dimension), 6.0, DEPTHS
    found = phase_diagram(
        betas=[beta],
        depths=depths,
        starts=starts,
        quantity="clusters",
        tolerance=1e-8,
        key=key,
    )
    exact = [
        [
            count_clusters(mf.TokenCloud(points), space=mf.Sphere(), beta=beta).count
            for points in solved(start, beta, depths)
        ]
        for start in starts
    ]
    np.testing.assert_allclose(found.mean[0], np.mean(exact, axis=0), atol=1e-12)
    np.testing.assert_allclose(found.median[0], np.median(exact, axis=0))


@pytest.mark.parametrize("dimension", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_ranks_are_those_of_the_gram_matrix(dimension, key):
    starts, beta, depths = on_sphere(10, dimension=dimension), 2.0, DEPTHS
    options = {"betas": [beta], "depths": depths, "starts": starts, "quantity": "rank"}
    found = phase_diagram(tolerance=1e-7, key=key, **options)
    exact = [
        [
            span_dimension(mf.TokenCloud(points))
            for points in solved(start, beta, depths)
        ]
        for start in starts
    ]
    np.testing.assert_allclose(found.mean[0], np.mean(exact, axis=0), atol=1e-12)
    capped = phase_diagram(cap=2, tolerance=1e-7, key=key, **options)
    least = np.mean(np.minimum(exact, 2), axis=0)
    np.testing.assert_allclose(capped.mean[0], least, atol=1e-12)


def test_every_quantity_ends_at_one(key):
    for quantity in ("pairs", "clusters", "rank"):
        found = phase_diagram(
            dimension=12,
            betas=[0.5],
            depths=5 * DEPTHS,
            count=8,
            starts=4,
            quantity=quantity,
            key=key,
        )
        np.testing.assert_array_equal(found.mean[:, -1], 1.0)
        np.testing.assert_array_equal(found.standard_error[:, -1], 0.0)


def test_the_smallest_product_never_decreases_once_positive(key):
    starts = on_sphere(11, dimension=12)
    found = phase_diagram(betas=[2.0], depths=2 * DEPTHS, starts=starts, key=key)
    reached = found.mean[0] == 1
    assert reached.any()
    assert reached[np.argmax(reached) :].all()


def test_starts_are_shared_by_all_temperatures_and_fixed_by_the_key(key):
    options = {"dimension": 3, "depths": DEPTHS, "count": 8, "starts": 4}
    several = phase_diagram(betas=[0.5, 4.0], key=key, level=0.5, **options)
    alone = phase_diagram(betas=[4.0], key=key, level=0.5, **options)
    np.testing.assert_array_equal(several.mean[1], alone.mean[0])
    np.testing.assert_array_equal(several.mean[0, 0], several.mean[1, 0])
    other = phase_diagram(betas=[4.0], key=jr.key(5), level=0.5, **options)
    assert not np.array_equal(other.mean, alone.mean)


def test_batches_and_threads_change_nothing_beyond_the_tolerance(key):
    options = {"dimension": 3, "betas": [1.0, 3.0], "depths": DEPTHS, "count": 8}
    whole = phase_diagram(starts=11, batch_size=11, tolerance=1e-9, key=key, **options)
    parts = phase_diagram(
        starts=11, batch_size=4, workers=3, tolerance=1e-9, key=key, **options
    )
    np.testing.assert_allclose(parts.mean, whole.mean, atol=1e-12)
    np.testing.assert_allclose(parts.standard_error, whole.standard_error, atol=1e-12)


@pytest.mark.parametrize("dimension", [3, 12])
@pytest.mark.parametrize("quantity", ["pairs", "clusters"])
def test_tokens_that_have_met_go_on_as_one(dimension, quantity, monkeypatch, key):
    options = {"betas": [1.0, 6.0], "depths": 4 * DEPTHS, "quantity": quantity}
    starts = on_sphere(17, 48, 8, dimension)
    whole = phase_diagram(starts=starts, tolerance=1e-6, key=key, **options)
    monkeypatch.setattr(batches, "MANY", 8)
    staged = phase_diagram(
        starts=starts, tolerance=1e-6, batch_size=4, workers=1, key=key, **options
    )
    np.testing.assert_allclose(staged.mean, whole.mean, atol=1e-3)


def test_starts_go_on_though_the_last_batches_have_ended(monkeypatch, key):
    starts = on_sphere(17, 48, 8, 3)
    # The last batches are one cluster soon, the others are not.
    starts[32:] += np.array([30.0, 0, 0])
    starts /= np.linalg.norm(starts, axis=2, keepdims=True)
    options = {"betas": [6.0], "depths": 4 * DEPTHS, "tolerance": 1e-6}
    whole = phase_diagram(starts=starts, key=key, **options)
    monkeypatch.setattr(batches, "MANY", 8)
    staged = phase_diagram(starts=starts, batch_size=4, workers=1, key=key, **options)
    np.testing.assert_allclose(staged.mean, whole.mean, atol=1e-3)


def test_leaders_are_the_first_tokens_of_their_groups():
    together = np.eye(5, dtype=bool)[None]
    for pair in ((0, 2), (2, 3), (1, 4)):
        together[0, pair, pair[::-1]] = True
    present = np.array([[True, True, True, True, False]])
    # Token 3 has met token 2 only, which follows token 0; token 4 is absent.
    np.testing.assert_array_equal(leaders_of(together, present), [[0, 1, 0, 3, 4]])


@pytest.mark.parametrize("is_gram", [False, True])
def test_groups_become_their_mean_directions(is_gram):
    tokens = on_sphere(18, 1, 16, 5)
    tokens[0, 4:] = tokens[0, :4][np.arange(12) % 4]
    states = tokens @ np.swapaxes(tokens, 1, 2) if is_gram else tokens
    group = StartGroup(states, np.ones((1, 16)), np.array([7]), np.array([0.5]))
    together = np.arange(16)[:, None] % 4 == np.arange(16)[None, :] % 4
    (small,) = shrunk(group, together[None], count=16, is_gram=is_gram)
    np.testing.assert_array_equal(small.numbers, [[4, 4, 4, 4]])
    np.testing.assert_array_equal(small.places, [7])
    exact = states[:, :4, :4] if is_gram else tokens[:, :4]
    np.testing.assert_allclose(small.states, exact, atol=1e-14)


def test_places_that_stay_empty_have_no_weight():
    tokens = on_sphere(19, 1, 16, 5)
    tokens[0, 3:] = tokens[0, 0]
    group = StartGroup(tokens, np.ones((1, 16)), np.array([0]), np.array([0.5]))
    together = np.ones((1, 16, 16), bool)
    together[0, 1:3] = together[0, :, 1:3] = False
    (small,) = shrunk(group, together, count=16, is_gram=False)
    np.testing.assert_array_equal(small.numbers, [[14, 1, 1, 0]])
    np.testing.assert_allclose(small.states[0, 3], tokens[0, 0], atol=1e-14)


def test_mean_and_standard_error_are_those_of_the_starts(key):
    starts = on_sphere(12)
    options = {"betas": [4.0], "depths": DEPTHS, "tolerance": 1e-9, "key": key}
    found = phase_diagram(starts=starts, **options)
    each = np.stack(
        [phase_diagram(starts=start[None], **options).mean[0] for start in starts]
    )
    np.testing.assert_allclose(found.mean[0], each.mean(axis=0), atol=1e-12)
    error = each.std(axis=0, ddof=1) / np.sqrt(4)
    np.testing.assert_allclose(found.standard_error[0], error, atol=1e-12)


def test_single_precision_is_an_option(key):
    options = {"dimension": 3, "betas": [1.0], "depths": [1.0], "count": 4, "starts": 2}
    found = phase_diagram(dtype="float32", key=key, **options)
    assert np.isfinite(found.mean).all()
    with pytest.warns(PrecisionWarning, match="use dtype=float64"):
        phase_diagram(dtype="float32", level=0.99999, key=key, **options)


def test_steps_have_the_order_of_the_method():
    tokens = jnp.asarray(on_sphere(13, 1, 6, 3))
    motion = IdentityAttention(equal(tokens), jnp.asarray(3.0), True)
    quantity = ClosePairs.of(jnp.asarray(1e-3), jnp.ones((1, 6)))

    def end(width):
        numbers = ([2.0], 2.0, 0.1, width)
        course = Course(*(jnp.asarray(number) for number in numbers))
        batch = begun(motion, quantity, tokens, course)._replace(width=course.longest)
        return np.asarray(continued(motion, quantity, batch, course).state)

    exact = end(1 / 256)
    errors = [np.abs(end(width) - exact).max() for width in (1 / 8, 1 / 16, 1 / 32)]
    orders = np.log2(np.divide(errors[:-1], errors[1:]))
    np.testing.assert_allclose(orders, 5, atol=0.5)


def identity_draw(key, beta):
    return mf.Softmax(jnp.eye(3), jnp.eye(3), jnp.eye(3), beta=beta)


def test_drawn_identities_give_the_diagram_of_identity_attention(key):
    starts = on_sphere(14)
    options = {"betas": [1.0, 4.0], "depths": DEPTHS, "starts": starts, "key": key}
    exact = phase_diagram(tolerance=1e-8, **options)
    drawn = phase_diagram(tolerance=1e-8, draw=identity_draw, **options)
    redrawn = phase_diagram(tolerance=1e-8, draw=identity_draw, redraw=1.5, **options)
    np.testing.assert_allclose(drawn.mean, exact.mean, atol=1e-12)
    np.testing.assert_allclose(redrawn.mean, exact.mean, atol=1e-12)
    assert drawn.kind == "drawn"


def gaussian_draw(key, beta):
    first, second = jr.normal(key, (2, 3, 3))
    return mf.Softmax(first, second, jnp.eye(3), beta=beta)


@pytest.mark.slow
def test_maps_that_are_redrawn_follow_a_schedule(key):
    starts, depths = on_sphere(15), 3 / 8 * DEPTHS
    options = {"betas": [2.0], "depths": depths, "level": 0.9, "tolerance": 1e-8}
    found = phase_diagram(
        starts=starts, draw=gaussian_draw, redraw=1.0, key=key, **options
    )
    key_maps = jr.split(key)[1]
    exact = []
    for index, start in enumerate(starts):
        keys = [jr.fold_in(jr.fold_in(key_maps, layer), index) for layer in range(3)]
        maps = [gaussian_draw(one, jnp.asarray(2.0)) for one in keys]
        flow = mf.Flow(mf.Schedule(maps, [0.0, 1.0, 2.0]), space=mf.Sphere())
        path = mf.solve(flow, mf.TokenCloud(start), 3.0, save=depths, rtol=1e-9)
        exact.append(fractions(np.asarray(path.points), 0.9))
    np.testing.assert_allclose(found.mean[0], np.mean(exact, axis=0), atol=1e-12)


def test_passages_are_read_off_the_mean(key):
    exact = phase_curve(16, [6.0, 9.0]).betas
    found = phase_diagram(
        betas=exact,
        depths=np.linspace(0, 12, 241),
        starts=np.eye(16)[None],
        tolerance=1e-6,
        key=key,
    )
    np.testing.assert_allclose(found.passage(), [6.0, 9.0], atol=0.03)
    never = phase_diagram(
        betas=[9.0], depths=[0.0, 1.0], starts=np.eye(16)[None], key=key
    )
    np.testing.assert_array_equal(never.passage(), [np.nan])


GOOD = {"dimension": 3, "betas": [1.0], "depths": [1.0], "count": 4, "starts": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dimension": None}, "dimension is missing"),
        ({"dimension": 1}, "dimension is 1; it must be 2 or more"),
        ({"count": 1}, "count is 1; it must be 2 or more"),
        ({"starts": 0}, "starts is 0; it must be 1 or more"),
        ({"betas": [-1.0]}, "betas must be finite and not negative"),
        ({"betas": []}, "betas must be a list"),
        ({"betas": [700.0], "kind": "unnormalised"}, r"exp\(beta\)"),
        ({"depths": [1.0, 1.0]}, "depths must increase"),
        ({"depths": [0.0]}, "depths must increase"),
        ({"kind": "linear"}, "kind is 'linear'"),
        ({"quantity": "mean"}, "quantity is 'mean'"),
        ({"level": 1.0}, "level is 1.0"),
        ({"threshold": 0.0}, "threshold is 0.0"),
        ({"quantity": "clusters", "betas": [0.0]}, "no scale for clusters"),
        ({"tolerance": 1e-20}, "tolerance is 1e-20"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"redraw": 1.0}, "redraw is given without draw"),
        ({"draw": identity_draw, "redraw": 0.0}, "redraw is 0.0"),
        ({"workers": 0}, "workers is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_bad_options_are_refused(changes, message, key, untyped):
    with pytest.raises(InvalidInput, match=message):
        phase_diagram(key=key, **(GOOD | changes))


def test_starts_off_the_sphere_or_of_another_dimension_are_refused(key):
    options = {"betas": [1.0], "depths": [1.0], "key": key}
    with pytest.raises(InvalidInput, match="norm"):
        phase_diagram(starts=2 * on_sphere(0, 2, 4, 3), **options)
    with pytest.raises(InvalidInput, match="the starts have dimension 3"):
        phase_diagram(starts=on_sphere(0, 2, 4, 3), dimension=5, **options)


def test_a_draw_that_is_no_map_is_refused(key):
    with pytest.raises(InvalidInput, match="not a map"):
        phase_diagram(key=key, draw=lambda key, beta: beta, **GOOD)


def test_equal_tokens_are_one_cluster_at_once(key):
    starts = np.tile(np.array([0.6, 0.8, 0.0]), (4, 8, 1))
    for quantity in ("pairs", "clusters", "rank"):
        found = phase_diagram(
            betas=[2.0], depths=DEPTHS, starts=starts, quantity=quantity, key=key
        )
        np.testing.assert_array_equal(found.mean, 1.0)


def test_antipodal_tokens_stay_apart(key):
    starts = np.array([[[1.0, 0.0], [-1.0, 0.0]]])
    found = phase_diagram(betas=[2.0], depths=[0.0, 5.0], starts=starts, key=key)
    np.testing.assert_array_equal(found.mean, 0.0)


def test_unit_tokens_can_be_differentiated():
    points = jnp.asarray(on_sphere(16, 1, 3, 3))
    gradient = jax.grad(lambda x: unit_tokens(x).sum())(points)
    assert np.isfinite(gradient).all()
