r"""Numbers and final answers inside free text. Pure; exact (:class:`fractions.Fraction`), linear in the text's length.

Rules, the same for every scorer:

* ``1,000`` = ``1{,}000`` = ``1\,000`` = ``1000``; ``.5`` = ``0.50`` = ``1/2`` = ``\frac{1}{2}``; ``2 2/3`` and
  ``2\frac{2}{3}`` are mixed numbers, 8/3, never 2. Any Unicode minus is a minus.
* A sign belongs to a number when nothing that ends a term stands before it: ``x = -3`` is -3, ``5-3`` ends in 3.
* Currency signs are units and are dropped: ``$42`` = ``42``.
* **Percent policy**: the percent sign is a unit too, and is dropped: ``50%`` = ``50``, and ``50%`` differs from ``0.5``.
  References such as GSM8K's give percentages as bare numbers, and dividing by 100 would make two numbers out of one.
* Digits of an exponent, an index or a word (``x^2``, ``a_1``, ``H2O``) aren't numbers of their own.
* Absurd numbers (over 100 characters, exponents of over three digits) aren't numbers: no comparison can cost much.
"""

import re
from collections.abc import Iterator
from fractions import Fraction

import msgspec

_MAX_CHARS = 100
_MINUS = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"))
_GROUP_GAP = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,!;:]|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))")
_LATEX_FRACTION = re.compile(r"(?P<whole>[0-9][ ]?)?\\[dt]?frac(?:\{(-?[0-9]{1,50})\}\{([0-9]{1,50})\}|([0-9])([0-9]))")

_PLAIN = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])|[0-9]++)(?:\.[0-9]++)?|(?<![0-9.])\.[0-9]++)"
_NUMBER = re.compile(
    rf"""
    (?<![0-9A-Za-z^]) (?<![A-Za-z]_) (?<![\^_]\{{)       # not inside a word, an exponent or an index
    (?P<sign>(?<![)\]}}])[-+])?+
    [$€£¥]?+ (?P<inner_sign>(?<=[$€£¥])[-+])?+ [ ]?
    (?:
      (?P<whole>[0-9]++)[ ]++(?P<part>[0-9]++)/(?P<of>[0-9]++)(?![0-9/])
    | (?P<over>{_PLAIN})[ ]?/[ ]?(?P<under>{_PLAIN})(?![0-9/])
    | (?P<plain>{_PLAIN}(?:[eE][-+]?[0-9]++(?![0-9A-Za-z]))?)
    )
    (?:[ ]?%)?
    """,
    re.VERBOSE | re.ASCII,
)
_WRAPPING = re.compile(
    r"^(?:\s|\*\*|`|\\\(|\\\[|\\left\(|\$(?=[^$]*\$))+|(?:\s|\*\*|`|\\\)|\\\]|(?<=[0-9%])\$|[.;,!](?=\s*$))+$"
)
_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


class Number(msgspec.Struct, frozen=True):
    """A number found in a text: its exact value, and its digits as written (no sign of currency, no grouping)."""

    value: Fraction
    text: str


def find_numbers(text: str) -> Iterator[Number | None]:
    """Every number of the text in order; None stands for one without a value (division by zero, absurdly long)."""
    return (_number(match) for match in _NUMBER.finditer(_normalised(text)))


def first_number(text: str) -> Number | None:
    """The first number of the text, or None if it has none (or one without a value)."""
    return next(find_numbers(text), None)


def last_number(text: str) -> Number | None:
    """The last number of the text, or None if it has none (or one without a value)."""
    last = None
    for number in find_numbers(text):
        last = number
    return last


def parse_number(text: str) -> Fraction | None:
    """The value of a text that is one number and nothing else (currency, percent, math and bold marks aside), or None."""
    bare = re.sub(r"^([-+])\s+", r"\1", _WRAPPING.sub("", _normalised(text)))
    match = _NUMBER.fullmatch(bare)
    number = _number(match) if match else None
    return number.value if number else None


def reference_number(answer: str) -> Fraction:
    """The number that a dataset's reference answer stands for.

    It may be a whole GSM8K solution (the number after ``####`` counts), a bare number, or a text with exactly one number.

    Raises:
        ValueError: there isn't exactly one; that is a fault of the dataset, not of a completion.
    """
    marked = after_marker(answer, "####")
    if marked is not None:
        number = first_number(marked)
        if number is not None:
            return number.value
    elif (value := parse_number(answer)) is not None:
        return value
    else:
        numbers = list(find_numbers(answer))
        if len(numbers) == 1 and numbers[0] is not None:
            return numbers[0].value
    raise ValueError(f"the reference answer {shorten(answer)!r} isn't one number")


def after_marker(text: str, marker: str) -> str | None:
    """The first non-blank line after the last ``marker``, stripped; "" if only blanks follow; None without a marker."""
    _, found, rest = text.rpartition(marker)
    return (rest.strip().splitlines() or [""])[0].strip() if found else None


def last_boxed(text: str) -> str | None:
    r"""Content of the complete ``\boxed{…}`` (or ``\fbox``) that opens last, braces balanced; None if there is none."""
    open_braces: list[int | None] = []  # content's start for a box, None for another brace
    best: tuple[int, int] | None = None
    for match in _BOX_OR_BRACE.finditer(text):
        token = match.group()
        if token == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None and (best is None or start > best[0]):
                best = (start, match.start())
        elif token == "{":
            open_braces.append(None)
        elif token.endswith("{") and len(token) > 2:
            open_braces.append(match.end())
    return text[best[0] : best[1]].strip() if best else None


def shorten(text: str, limit: int = 80) -> str:
    """The text on one line, cut to ``limit`` characters, for reasons and errors."""
    line = " ".join(text[: 4 * limit].split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _normalised(text: str) -> str:
    """The text with one spelling for minus, digit groups, escaped currency and percent, and LaTeX fractions of integers."""
    text = _GROUP_GAP.sub("", text.translate(_MINUS)) if _GROUP_GAP.search(text) else text.translate(_MINUS)
    text = text.replace("\\$", "$").replace("\\%", "%")
    return _LATEX_FRACTION.sub(_plain_fraction, text)


def _plain_fraction(match: re.Match[str]) -> str:
    whole, over, under = match["whole"], match[2] or match[4], match[3] or match[5]
    return f"{whole.strip()} {over}/{under}" if whole else f"{over}/{under}"


def _number(match: re.Match[str]) -> Number | None:
    exponent = re.search(r"[eE][-+]?(?P<digits>.*)", match["plain"] or "")
    if match.end() - match.start() > _MAX_CHARS or (exponent and len(exponent["digits"]) > 3):
        return None
    negative = "-" in (match["sign"], match["inner_sign"])
    if match["whole"]:
        numerator, denominator = Fraction(match["part"]), Fraction(match["of"])
        text = f"{match['whole']} {match['part']}/{match['of']}"
    elif match["over"]:
        numerator, denominator = _plain(match["over"]), _plain(match["under"])
        text = f"{match['over']}/{match['under']}".replace(",", "")
    else:
        numerator, denominator, text = _plain(match["plain"]), Fraction(1), match["plain"].replace(",", "")
    if denominator == 0:
        return None
    value = Fraction(match["whole"] or 0) + numerator / denominator
    return Number(value=-value, text=f"-{text}") if negative else Number(value=value, text=text)


def _plain(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))
