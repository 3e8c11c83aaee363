"""The page on how the library is built, compared with the library."""

import re
import sys
from pathlib import Path

import jax.random as jr
import pytest

import meanformer as mf

PACKAGE = Path(mf.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def files_entered(call):
    """The files of the package in which a function is called on the way."""
    entered = set()

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.add(path.relative_to(PACKAGE).as_posix())

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.slow
def test_a_solve_goes_through_as_many_files_as_the_page_says():
    # A shape that no other test has compiled.
    cloud = mf.TokenCloud(mf.UniformSphere(3).sample(37, key=jr.key(0)))
    attention = mf.identity_attention("softmax", dimension=3, beta=4.0)
    flow = mf.Flow(attention, space=mf.Sphere())
    entered = files_entered(lambda: mf.solve(flow, cloud, depth=10.0))
    page = PAGE.read_text()
    said = int(re.search(r"(\d+) in all with checks of input", page)[1])
    # The front door counts where a name is asked for the first time.
    assert len(entered | {"__init__.py"}) == said
    named = re.findall(
        r"`((?:flows|attention|measures|geometry|numerics)/\S+\.py)`", page
    )
    assert all((PACKAGE / name).is_file() for name in named)
