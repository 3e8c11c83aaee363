"""The translation of Markdown docstrings for the API pages."""

import markdown_docstrings
import pytest

KEYS = frozenset({"GLPR23"})


@pytest.mark.parametrize(
    ("markdown", "rest"),
    [
        ("the mass $w_i \\ge 0$.", "the mass :math:`w_i \\ge 0`."),
        ("pass `key`; not ``this``.", "pass ``key``; not ``this``."),
        ("the $n$th token", "the :math:`n`\\ th token"),
        ("proved in [GLPR23].", "proved in :cite:p:`GLPR23`."),
        ("see [GLPR23, Lemma 2]", "see :cite:p:`GLPR23` (Lemma 2)"),
        ("an entry [XYZ99] that is unknown", "an entry [XYZ99] that is unknown"),
        ("|x| = 1 and a*b", "\\|x\\| = 1 and a\\*b"),
        ("`a|b` and $|x|$", "``a|b`` and :math:`|x|`"),
    ],
)
def test_running_text_becomes_rest(markdown, rest):
    assert markdown_docstrings.translate(markdown, KEYS) == rest


def test_a_displayed_formula_becomes_a_directive_with_its_indentation():
    docstring = "Energy.\n\n    $$E = \\int\n      |x|^2.$$\n\nEnd."
    assert markdown_docstrings.translate(docstring, KEYS) == (
        "Energy.\n\n\n    .. math::\n\n       E = \\int\n       |x|^2.\n\n\nEnd."
    )


def test_a_table_becomes_a_list_table():
    docstring = "| name | when |\n|---|---|\n| `a` | $x > y$ or \\| |\n"
    assert markdown_docstrings.translate(docstring, KEYS) == (
        "\n.. list-table::\n   :header-rows: 1\n\n"
        "   * - name\n     - when\n   * - ``a``\n     - :math:`x > y` or \\|\n\n"
    )
