"""Numbers in requests, as /openapi.json describes them: no truths, no texts, bounds that every reader of JSON carries.

Pydantic alone takes true for 1 and "1_0" for 10, and a bound such as 2^63 reaches the description as a double
whose decimal digits are another number.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

MOST = 2**53 - 1  # the largest whole number that a double tells from its neighbours
MOST_NS = 4 * 10**18  # of a clock: 126 years; the same number in binary and in decimal
_DIGITS = re.compile(r"[0-9]{1,19}", re.ASCII)


def _number(value: object) -> object:
    """What is a number in JSON; pydantic judges the rest, 1.0 and 1.5 included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("number_type", "Input should be a number")
    return value


def _digits(value: object) -> object:
    """In a query everything is text: digits are a number."""
    if isinstance(value, str) and not _DIGITS.fullmatch(value):
        raise PydanticCustomError("digits", "Input should be digits")
    return value


NUMBER = BeforeValidator(_number)
DIGITS = BeforeValidator(_digits)

Count = Annotated[int, Field(ge=0, le=MOST), NUMBER]
Moment = Annotated[int, Field(ge=0, le=MOST_NS), NUMBER]  # nanoseconds of a monotonic clock
Duration = Annotated[int, Field(gt=0, le=MOST_NS), NUMBER]  # nanoseconds
