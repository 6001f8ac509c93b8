"""Strategies for what anyone may write into a file or a command line: junk values, changed structures, broken bytes."""

import json
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

LONG = 20_000
HUGE = (0, -1, 2**31, 2**63, 10**20, -(10**30), 10**400)
NUMBERS = st.one_of(
    st.integers(-3, 40), st.sampled_from(HUGE), st.floats(), st.sampled_from([1e-45, 1e308, -0.0, 1e-38, 0.5])
)
WORDS = st.sampled_from(
    [
        *(
            "",
            " ",
            "x",
            "no",
            "../x",
            "/dev/null",
            "a/b",
            "\x1b[31m",
            "\u202e",
            "\ud800",
            "\0",
            "é",
            "🦜",
            "a" * LONG,
            "nan",
        ),
        *("inf", "null", "~", "*a", "{", "[", "%s", "{{ x }}", "<!-- -->", "embedded", "auto", "1e999", "\n\n"),
    ]
)
TEXTS = st.one_of(WORDS, st.text(max_size=20))
SIMPLE = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
JUNK = st.recursive(
    SIMPLE, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=4
)


@st.composite
def changed(draw: st.DrawFn, value: Any, most: int = 2) -> Any:
    """`value` with a few of its parts replaced, removed, renamed, doubled or wrapped."""
    whole = {"": deepcopy(value)}
    for _ in range(draw(st.integers(1, most))):
        place, key = whole, ""
        while isinstance(place[key], dict | list) and place[key] and draw(st.integers(0, 4)):
            place = place[key]
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = draw(st.sampled_from(list(keys)))
        _change(draw, place, key)
        if "" not in whole:
            break
    return whole.get("")


def _change(draw: st.DrawFn, place: Any, key: Any) -> None:
    kind = draw(st.sampled_from(["junk", "junk", "junk", "number", "remove", "rename", "wrap", "add"]))
    if kind == "number":
        place[key] = draw(NUMBERS)
    elif kind == "remove":
        del place[key]
    elif kind == "rename" and isinstance(place, dict):
        place[draw(TEXTS)] = place.pop(key)
    elif kind == "wrap":
        place[key] = [place[key]] if draw(st.booleans()) else {"a": place[key]}
    elif kind == "add" and isinstance(place[key], dict):
        place[key][draw(TEXTS)] = draw(JUNK)
    elif kind == "add" and isinstance(place[key], list):
        place[key].append(draw(JUNK))
    else:
        place[key] = draw(JUNK)


@st.composite
def broken(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` cut, with other bytes in it, or something else altogether."""
    place = draw(st.integers(0, len(content)))
    kind = draw(st.sampled_from(["cut", "other", "other", "insert", "random", "empty", "twice"]))
    if kind == "cut":
        return content[:place]
    if kind == "other":
        new = draw(st.binary(min_size=1, max_size=8))
        return content[:place] + new + content[place + len(new) :]
    if kind == "insert":
        return content[:place] + draw(st.binary(max_size=20)) + content[place:]
    if kind == "random":
        return draw(st.binary(max_size=200))
    return b"" if kind == "empty" else content + content


def encoded(text: str) -> bytes:
    """As bytes, whatever stands in it."""
    return text.encode("utf-8", "surrogatepass")


def as_json(value: Any) -> bytes:
    """As JSON, whatever stands in it."""
    return encoded(json.dumps(value, ensure_ascii=False))
