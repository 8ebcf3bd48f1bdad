"""Test the comparison of answers as text: what may be dropped, and what changes the meaning."""

from __future__ import annotations

import time

import pytest

from agentrl.scoring.math_equality import LONGEST, normal_form, number, same, without_articles, word_f1

SAME = [
    ("The  Eiffel Tower.", "eiffel tower"), ("1,000", "1000"), ("4.0", "4"), ("Ｐaris", "paris"),
    ("(A)", "A"), ("A.", "A"), ("a", "A"), ("**A**", "A"), ("A)", "A"), ("[A]", "A"), ("(B)", "B"),
    (r"\text{A}", "A"), (r"\textbf{(A)}", "A"), ("$A$", "A"), ("the who", "The Who"), ("The", "the"),
    ("an", "AN"), ("THE THE", "The The"), ("3²", "3^2"), ("3²", "3^{2}"), ("10⁻²", "10^{-2}"),
    ("10^-2", "10^{-2}"), ("½", r"\frac{1}{2}"), ("2½", r"2\frac{1}{2}"), (r"\$70,000", "70000"),
    (r"\$70{,}000", "70000"), (r"\$18.00", "18"), (r"70\,000", "70000"), ("70{,}000", "70000"),
    ("$5", "5"), ("-$5", "-5"), (r"\$-5", "-5"), (r"5\%", "5%"), ("5 %", "5%"), ("−5", "-5"),
    ("70,000 dollars", "70000 dollars"), ("Paris, France", "paris france"),
    ("Jean-Paul Sartre", "jean paul sartre"), ('"Paris"', "Paris"), ("`x`", "x"),
    ("Dr. Smith", "dr smith"), ("(3, 2)", "(3,2)"), ("x = 5", "x=5"), (r"\left(0,1\right]", "(0,1]"),
    (r"\dfrac{1}{2}", r"\frac{1}{2}"), (r"x \le 3", r"x\le3"), ("Mr. Smith!", "mr smith"),
    ("St. John’s", "st. john's"), ("3 PM", "3 pm"), ("5 Apples", "5 apples"), ("vitamin A", "Vitamin a"),
    ("a cat", "cat"), (r"$\frac{1}{2}$", r"\frac{1}{2}"), (r"\(x\)", "x"), (r"\[5\]", "5"), ("(5)", "5"),
    ("Paris (France)", "paris france"), (r"\text{Monday}", "monday"), ("Option A", "A"), ("choice b", "B"),
    ("(A) Paris", "A. Paris"), ("A: Paris", "A) Paris"), ("US$5", "5"), ("10:30 a.m.", "10:30 AM"),
    ("10:30am", "10:30 AM"), ("U.S.", "US"), ("U.S.A.", "USA"), ("John F. Kennedy", "John F Kennedy"),
    ("5km", "5 km"), ("x_1", "x_{1}"), ("1\u202f234", "1234"), ("1\u00a0234\u00a0567", "1,234,567"),
    ("‑5", "-5"), ("–5", "-5"), ("٥", "5"), ("१२", "12"), ("1⁄2", "1/2"), ("1990–1995", "1990-1995"),
    (r"5\degree", "5°"), ("= 5", "5"), ("𝟓", "5"), (r"58,\!500", "58500"), (r"\boxed{A}", "A"),
    (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"), ("January 5, 2024", "january 5 2024"), ("北京。", "北京"),
    ("\u202e4", "4"), ("4\u200e", "4"), (".", "."), ('{"a": [1, "x"], "b": 2}', '{"b":2,"a":[1,"x"]}'),
]  # fmt: skip
DIFFERENT = [
    ("!", "?"), ("1,0,0", "100"), (r"\frac{1}{2}", r"-\frac{1}{2}"), ("2-3i", "2+3i"),
    ("(3,2)", "(3,-2)"), ("x<3", "x>3"), ("(0,1]", "[0,1)"), ("(0,1]", "[0,1]"), ("1-2", "1/2"),
    ("x=5", "x=-5"), ("5%", "-5%"), ("5%", "5"), ("$5", "-$5"), ("-3/4", "3/4"), ("5 m", "-5 m"),
    ("a-b", "a+b"), ("3²", "32"), ("10⁻²", "10^2"), ("10⁻²", "10^{2}"), ("2½", "21/2"), ("ℝ", "R"),
    ("5!", "5"), ("n!", "n"), ("0.333...", "0.333"), ("0.333…", "0.333"), ("|x|", "x"),
    ("vitamin A", "vitamin"), ("A minor", "minor"), ("The A team", "The team"), ("5 mW", "5 MW"),
    ("5 Mb", "5 MB"), ("x+Y", "x+y"), ("2b", "2B"), ("1, 234", "1,234"), ("(1,234)", "1234"),
    ("€5", "$5"), ("€5", "5"), ("f'(x)", "f(x)"), ("{1,2}", "(1,2)"), ("[1]", "1"), ("x_1", "x_2"),
    ("a b", "ab"), ("12", "1 2"), ("1.000", "1000"), ("x^{2}3", "x^{23}"), ("5 m", "5 km"),
    ("5 m^2", "5 m^3"), ("Paris or London", "Paris and London"), ("not Paris", "Paris"), ("C", "C++"),
    ("C#", "C"), ("C", "C*"), ("a", "an"), ("1:2", "1/2"), ("A or B", "A"), ("US", "U S"), ("A, B", "A"),
    (r"\begin{pmatrix}1\\ 2\end{pmatrix}", r"\begin{pmatrix}1 2\end{pmatrix}"), ("5-3", "5 3"),
    ("re-sign", "resign"), ("≠", "="), ("x≠5", "x=5"), ("x≤5", "x<5"), ("5±1", "51"), ("√3", "3"),
    ("(A) Paris", "B. Paris"), ("A: Paris", "A"), ("Option AB", "A"), ("10:30 am", "10:30 pm"),
    ("1 234", "1234"), ("x_1", "x_{12}"), ("5 kM", "5 km"), ("= 5", "= 6"), ("A$5", "5"), ("V.A", "V A"),
    ("1\u00a023", "123"), ("-", "+"), (">", "<"), ("sin(x y)", "sin(x) y"), ("5", "5 or 6"), ("", ""),
    ("", " "), ("\u200b", ""), ("", "."), (".", ","), (r"\boxed{}", ""), ('{"a": 1}', '{"a": true}'),
    ('{"a": 1}', '{"a": "1"}'), ("[1, 2]", "[2, 1]"), ("Psalm 5, 2024", "Psalm 52024"),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), SAME)
def test_what_does_not_change_the_meaning_does_not_count(left: str, right: str) -> None:
    assert same(left, right)
    assert same(right, left)


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_what_changes_the_meaning_counts(left: str, right: str) -> None:
    assert not same(left, right)
    assert not same(right, left)


@pytest.mark.parametrize(
    "form", ["{}", "({})", "{}.", "**{}**", "{})", "[{}]", r"\text{{{}}}", r"\textbf{{({})}}"]
)
@pytest.mark.parametrize("letter", "ABCDZ")
def test_every_option_is_read_alike(form: str, letter: str) -> None:
    for written in (letter, letter.lower()):
        assert same(form.format(written), letter)
        assert not same(form.format(written), "K")


@pytest.mark.parametrize(
    ("text", "value"), [("1,234.50", "1234.5"), ("5.", "5"), ("1e3", "1000"), ("-$5", "-5")]
)
def test_numbers(text: str, value: str) -> None:
    assert str(number(text).normalize()) == str(number(value).normalize())  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["5..", "1_000", "nan", "inf", "1,00", "3²", "--5", "5%", "", "5 6"])
def test_what_is_no_number(text: str) -> None:
    assert number(text) is None


def test_words_count_once_each_and_operators_count() -> None:
    assert word_f1("x<3", "x>3") == word_f1("-5", "5") == 0
    assert word_f1("vitamin A", "vitamin") == pytest.approx(2 / 3)
    assert word_f1("A", "a") == word_f1("the", "The") == word_f1("5", "5.0") == word_f1(".1", "0.1") == 1
    assert word_f1("", "") == word_f1("", "the") == 0


@pytest.mark.parametrize(
    "unit",
    ["a ", "(", "$", "a-", "1,000", r"\text{", ".", " ", "a. ", "^1", "*", '"', "\\ ", "½", "²", "A the "],
)
def test_the_cost_is_bounded(unit: str) -> None:
    started = time.process_time()
    for text in (unit * (LONGEST // len(unit)), unit * 20_000):
        normal_form(text)
        without_articles(text)
        number(text)
    assert time.process_time() - started < 1
