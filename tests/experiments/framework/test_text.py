"""Formulas, numbers and citations as people read them."""

import pytest
from pybtex.database import parse_file

from meanformer.errors import InvalidInput
from meanformer.experiments import Claim, closed_form
from meanformer.experiments.framework import citations
from meanformer.experiments.framework.numbers import finding_digits, plain
from meanformer.experiments.framework.text import to_html, to_plain


@pytest.mark.parametrize(
    ("latex", "text"),
    [
        (
            r"R(t) \le e^{\int_0^t \|V(s)\|_2\,\mathrm{d}s} R_0",
            "R(t) ≤ e^(∫₀ᵗ ‖V(s)‖₂ ds)R₀",
        ),
        (r"\frac{1}{2\beta}\sum_{j=1}^n P_{ij} x_j", "1/(2β) ∑ⱼ₌₁ⁿ Pᵢⱼxⱼ"),
        (r"\max_\mu E_\beta(\mu)", "max_μ E_β(μ)"),
        (r"x \in \mathbb{R}^d", "x ∈ ℝᵈ"),
        (r"n^{-1/2}, A^\top", "n^(−1/2), Aᵀ"),
        (r"\sqrt{n-1}, \hat{x}, \bar{x}", "√(n−1), x̂, x̄"),
        (r"\operatorname{Lip}_x(F) \log n", "Lipₓ(F)log n"),
        (r"e^{tV}x_1, e^{tn}, \frac{1}{tV}", "e^(tV)x₁, eᵗⁿ, 1/(tV)"),
        (r"\frac{x_i}{\hat{x}}, \sqrt{x_j}", "xᵢ/x̂, √xⱼ"),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "(1 2; 3 4)"),
    ],
)
def test_formulas_become_one_line_of_unicode(latex, text):
    assert to_plain(f"${latex}$") == text


def test_words_around_formulas_stay():
    assert to_plain("For $x > 0$ the\n  `value` is $10^{-6}$.") == (
        "For x > 0 the value is 10⁻⁶."
    )


def test_html_escapes_words_and_draws_formulas():
    page = to_html(r"If a < b & `c`, then $\langle x, y\rangle \le 1$.")
    assert page.startswith("If a &lt; b &amp; <code>c</code>, then <span")
    assert page.endswith("</math>.</span>")
    assert "<mo>≤</mo>" in page


def test_upright_letters_stay_upright():
    assert '<mi mathvariant="normal">d</mi>' in to_html(r"$\mathrm{d}s$")
    assert "<mi>Lip</mi>" in to_html(r"$\mathrm{Lip}$")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (3, "3"),
        (1.5681443, "1.5681"),
        (-0.5, "-0.5"),
        (123456.7, "123457"),
        (40000000, "40000000"),
        (1e-10, "10⁻¹⁰"),
        (-2.5e-7, "-2.5×10⁻⁷"),
        (6.02e23, "6.02×10²³"),
        (float("nan"), "not a number"),
        (float("inf"), "+∞"),
        (True, "True"),
        ("word", "word"),
    ],
)
def test_numbers_are_short(value, text):
    assert plain(value) == text


def test_enough_digits_to_see_on_which_side_of_a_bound():
    claim = Claim("a", "b", "observation")
    finding = claim.below(0.999999987, 1.0, source=closed_form())
    assert plain(finding.measured, finding_digits(finding)) == "0.99999999"


def test_our_bibliography_is_read_as_pybtex_reads_it():
    path = citations.bibliography_file()
    ours, theirs = citations.bibliography(path), parse_file(str(path)).entries
    assert list(ours) == list(theirs)
    for key, entry in theirs.items():
        fields = {name.lower(): value for name, value in entry.fields.items()}
        own = dict(ours[key].fields)
        assert own.pop("author").count(" and ") == len(entry.persons["author"]) - 1
        assert {k: " ".join(v.split()) for k, v in own.items()} == fields


ENTRY = r"""
% a comment with @article{no, title={x}}
@Article{Key01,
  author = {Sch{\"o}nlieb, Carola-Bibiane and Peyr{\'e}, Gabriel and de Hoop, Maarten},
  title  = "On {W}asserstein \& Friends",
  journal = {Journal},
  year = 2001,
  doi = {10.1000/x_y},
}
"""


def test_an_entry_is_formatted_in_plain_unicode():
    (entry,) = citations.parse(ENTRY)
    assert entry.key == "Key01"
    assert entry.authors == "Carola-Bibiane Schönlieb, Gabriel Peyré, Maarten de Hoop"
    assert entry.short == "Schönlieb, Peyré and de Hoop (2001)"
    assert entry.text("title") == "On Wasserstein & Friends"
    assert entry.address == "https://doi.org/10.1000/x_y"
    assert entry.bibtex.startswith("@Article{Key01,")
    assert entry.bibtex.endswith("}")


def test_an_open_brace_is_told():
    with pytest.raises(InvalidInput, match="not closed"):
        citations.parse("@misc{a, title={b}")


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(InvalidInput, match="did you mean CACP25"):
        citations.lookup("CACP2")
