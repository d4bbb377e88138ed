"""Numbers and final answers in free text: design §8's rules, and round trips."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.rewards.answers import (
    after_marker,
    first_number,
    last_boxed,
    last_number,
    parse_number,
    reference_number,
    shorten,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,000", 1000),
        ("1{,}000", 1000),
        (r"1\,000", 1000),
        ("1\u202f000", 1000),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("42.", 42),
        ("$42", 42),
        (r"\$42", 42),
        ("-$42", -42),
        ("$-42", -42),
        ("$-42$", -42),
        ("**42**", 42),
        ("−3", -3),
        ("- 3", -3),
        ("+3", 3),
        (".5", Fraction(1, 2)),
        ("2 2/3", Fraction(8, 3)),
        ("-2 2/3", Fraction(-8, 3)),
        (r"2\frac{2}{3}", Fraction(8, 3)),
        (r"12\frac12", Fraction(25, 2)),
        (r"\frac{-1}{2}", Fraction(-1, 2)),
        ("6/4", Fraction(3, 2)),
        ("1.5e3", 1500),
        ("50%", 50),
        (r"50\%", 50),
    ],
)
def test_a_number_alone_has_one_value_however_it_is_written(text: str, value: Fraction) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize("text", ["", "x", "2x", "3 4", "(3,4)", "x=5", "1,00", "5/0", "1/2/3", "9" * 101, "1e9999", "٣"])
def test_what_is_not_one_number_has_no_value(text: str) -> None:
    assert parse_number(text) is None


def test_a_mixed_number_is_not_its_whole_part_and_percent_is_a_unit() -> None:
    assert parse_number("2 2/3") != parse_number("2")
    assert parse_number("50%") == parse_number("50") != parse_number("0.5")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16 - 3 - 4 = 9 eggs.", 9),
        ("so it is 5-3", 3),
        ("x = -3.", -3),
        ("**Answer:** $1,234.", 1234),
        ("about 2 2/3 cups of H2O, in cm^2 or x_1 or a^{10}", Fraction(8, 3)),
        ("_42_", 42),
        ("so...5", 5),
        ("in 3–5 days", 5),
        ("1. one\n2. two: 7", 7),
        (r"thus \boxed{-\frac{1}{2}}", Fraction(-1, 2)),
    ],
)
def test_last_number_of_prose(text: str, value: Fraction) -> None:
    number = last_number(text)
    assert number is not None
    assert number.value == value


def test_no_number_and_an_undefined_one_are_none() -> None:
    assert last_number("none at all") is None
    assert last_number("2 and then 5/0") is None
    assert first_number("") is None


@pytest.mark.parametrize(
    "text", ["#### 42", "#### 42.", "#### $42", "####42", "a 7\n#### 42\n", "####\n42", "#### 7\n#### 42 apples"]
)
def test_gsm8k_references(text: str) -> None:
    assert reference_number(text) == 42


def test_unicode_minus_after_the_marker() -> None:
    assert reference_number("#### −3") == -3


@pytest.mark.parametrize("text", ["", "####", "#### many", "3 or 4", "word"])
def test_a_reference_without_one_number_is_the_datasets_fault(text: str) -> None:
    with pytest.raises(ValueError, match="isn't one number"):
        reference_number(text)


def test_after_marker() -> None:
    assert after_marker("Answer: a\nAnswer:  b \nc", "Answer:") == "b"
    assert after_marker("Answer:", "Answer:") == ""
    assert after_marker("b", "Answer:") is None


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"{ \boxed{1}", "1"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"} \fbox{ 4 }", "4"),
        ("no box {5}", None),
        (r"\boxed{", None),
    ],
)
def test_last_complete_box(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_long_hostile_texts_are_read_in_time() -> None:
    start = time.monotonic()
    for text in ("1" * 50_000, "1," * 25_000, "1 2/" * 12_000, r"\boxed{" * 10_000, " " * 50_000, r"\frac{1}" * 6_000):
        last_number(text)
        last_boxed(text)
        parse_number(text)
    assert time.monotonic() - start < 10  # linear: about a second


@given(st.integers(-(10**40), 10**40))
def test_integers_round_trip_with_and_without_groups(value: int) -> None:
    for text in (str(value), f"{value:,}", f"{value}.", f"${value}$", str(value).replace("-", "−")):
        assert parse_number(text) == value
        assert reference_number(f"steps\n#### {text}") == value
    found = last_number(f"Take 7 and 8: it is {value:,}.")
    assert found is not None
    assert found.value == value


@given(st.decimals(min_value=-(10**12), max_value=10**12, places=6))
def test_decimals_round_trip(value: object) -> None:
    assert parse_number(f"{value:,f}") == Fraction(str(value))


@given(st.integers(0, 999), st.integers(0, 999), st.integers(1, 999), st.booleans())
def test_fractions_round_trip(whole: int, over: int, under: int, negative: bool) -> None:
    sign, factor = ("-", -1) if negative else ("", 1)
    assert parse_number(f"{sign}{over}/{under}") == factor * Fraction(over, under)
    for mixed in (f"{sign}{whole} {over}/{under}", rf"{sign}{whole}\frac{{{over}}}{{{under}}}"):
        assert parse_number(mixed) == factor * (whole + Fraction(over, under))


@given(st.text(alphabet=st.sampled_from("0123456789.,/ -−$%{}\\^_eEfracboxd#\n*x"), max_size=60))
def test_any_text_is_read_without_error(text: str) -> None:
    last_number(text)
    last_boxed(text)
    value = parse_number(text)
    found = last_number(text)
    assert value is None or (found is not None and found.value == value)


def test_shortened_texts_are_one_line() -> None:
    assert shorten("a\n b") == "a b"
    assert len(shorten("x" * 1000)) == 80
