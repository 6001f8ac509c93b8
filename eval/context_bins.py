"""Acceptance by the length of the context, that is, the tokens that are committed before a round.

A drafter that was trained on short texts accepts less after long ones, which an average over all rounds hides.
"""

from collections.abc import Iterable

from typing_extensions import TypedDict  # pydantic cannot read typing's before Python 3.12

from draftsmith.eval.journal import ACCEPTED, CORRECTION, TextRecord

SHORTEST = 128
"""Contexts below this length form the first bin; each further bin is twice as long as the one before it."""
ENOUGH, FALL = 50, 0.85
"""Rounds of a bin that is compared, and the share of the first bin's tau below which a fall is worth a note."""


class ContextBin(TypedDict):
    """Rounds whose context has at least `start` and fewer than `end` tokens."""

    start: int
    end: int
    rounds: int
    tau: float
    accepted: float
    """Share of the tested draft tokens that were accepted."""


def by_context(texts: Iterable[TextRecord]) -> list[ContextBin]:
    """Return tau and acceptance by context length, shortest first; bins without a round are left out."""
    counts: dict[int, list[int]] = {}
    for text in texts:
        length = text.prompt_tokens
        if not length:
            continue  # from a journal of a version that did not store it
        for number, kinds in enumerate(text.rounds):
            if number:  # the first string is the token that the prefill gave
                place = (length // SHORTEST).bit_length()
                accepted = kinds.count(ACCEPTED)
                values = (1, len(kinds), accepted, accepted + kinds.count(CORRECTION))
                counts[place] = [a + b for a, b in zip(counts.get(place, (0,) * 4), values, strict=True)]
            length += len(kinds)
    return [
        {
            "start": SHORTEST << place >> 1 if place else 0,
            "end": SHORTEST << place,
            "rounds": rounds,
            "tau": tokens / rounds,
            "accepted": accepted / tested if tested else 0.0,
        }
        for place, (rounds, tokens, accepted, tested) in sorted(counts.items())
    ]


def fall(bins: list[ContextBin]) -> str | None:
    """Return a sentence that says how far tau falls in long contexts; None where it does not."""
    often = [one for one in bins if one["rounds"] >= ENOUGH]
    if len(often) < 2 or often[-1]["tau"] >= FALL * often[0]["tau"]:
        return None
    first, last = often[0], often[-1]
    return (
        f"tau falls from {first['tau']:.2f} in contexts below {first['end']:,} tokens to {last['tau']:.2f} from "
        f"{last['start']:,} on; train on texts of such lengths (data.prompt_tokens, data.response_tokens)."
    )
