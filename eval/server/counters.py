"""An engine's counters of its drafts, read before and after a measurement.

vLLM and llama-server count drafts, and accepted tokens by position; SGLang counts verifications. They are Prometheus
counters of the whole server, so other requests during the measurement would count too.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from draftsmith.distill.server.settings import server_key
from draftsmith.errors import ConfigError, reason_of

if TYPE_CHECKING:
    import httpx

SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)")
POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')
ROUNDS = ("vllm:spec_decode_num_drafts", "llamacpp:spec_decode_num_drafts", "sglang:spec_verify_calls")
DRAFT_TOKENS = ("vllm:spec_decode_num_draft_tokens", "llamacpp:spec_decode_num_draft_tokens")
PER_POSITION = ("vllm:spec_decode_num_accepted_tokens_per_pos", "llamacpp:spec_decode_num_accepted_tokens_per_pos")
GENERATED = ("vllm:generation_tokens", "llamacpp:tokens_predicted", "sglang:generation_tokens")
"""Counters that exist without speculation, too: with them a server without drafts is told from one without metrics."""
SECONDS = 30.0


@dataclass(frozen=True)
class Counters:
    """Numbers of a server since its start."""

    known: bool
    """The server has counters at all."""
    rounds: float = 0.0
    """Verified drafts of all texts."""
    accepted: tuple[float, ...] = ()
    """By draft position, drafts that were accepted up to it; empty where the engine does not count positions."""
    drafted: float = 0.0
    """Draft tokens, where the engine counts them."""

    def since(self, before: "Counters") -> "Counters":
        """Return the difference; ConfigError if the server was started again in between."""
        earlier = (*before.accepted, *([0.0] * len(self.accepted)))
        accepted = tuple(now - then for now, then in zip(self.accepted, earlier, strict=False))
        rounds = self.rounds - before.rounds
        if rounds < 0 or any(count < 0 for count in accepted) or len(self.accepted) < len(before.accepted):
            raise ConfigError("server's counters have decreased: it was started again; expected one that keeps running")
        return Counters(self.known, rounds, accepted, self.drafted - before.drafted)


def parse_counters(text: str) -> Counters:
    """Return the numbers in Prometheus' text format, summed over engines and ranks."""
    known, rounds, drafted, accepted = False, 0.0, 0.0, dict[int, float]()
    for line in text.splitlines():
        match = SAMPLE.match(line)
        if match is None:
            continue
        name, value = match["name"].removesuffix("_total"), _number(match["value"])
        known |= name in GENERATED + ROUNDS
        rounds += value if name in ROUNDS else 0.0
        drafted += value if name in DRAFT_TOKENS else 0.0
        position = POSITION.search(match["labels"] or "") if name in PER_POSITION else None
        if position is not None:
            place = int(position[1])
            accepted[place] = accepted.get(place, 0.0) + value
    positions = tuple(accepted.get(place, 0.0) for place in range(max(accepted, default=-1) + 1))
    return Counters(known, rounds, positions, drafted)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if abs(value) < 1e300 else 0.0


class CounterRoutes:
    """The routes of a server's counters, beside OpenAI's."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.root = urlunsplit((parts.scheme, parts.netloc, parts.path.removesuffix("/v1"), "", ""))
        import httpx

        headers = {"Authorization": f"Bearer {server_key()}"} if server_key() else {}
        self._client = httpx.Client(headers=headers, timeout=SECONDS)

    def counters(self) -> Counters:
        """Return the counters now; those of a server without the route are not known."""
        answer = self._get("/metrics")
        return Counters(False) if answer is None else parse_counters(answer.text)

    def sglang_tau(self) -> float | None:
        """Return SGLang's mean acceptance length since its start; None where it is not told."""
        for state in self._states():
            value = state.get("avg_spec_accept_length")
            if isinstance(value, int | float) and 1 <= value < 1e6:
                return float(value)
        return None

    def sglang_draft_length(self) -> int | None:
        """Return the draft length of SGLang's chains; None where it is not told. ConfigError for trees."""
        for state in self._states():
            count, branches = state.get("speculative_num_draft_tokens"), state.get("speculative_eagle_topk")
            if isinstance(branches, int) and branches > 1:
                raise ConfigError(
                    f"server {self.root} drafts trees (topk={branches}); expected --speculative-eagle-topk 1"
                )
            if isinstance(count, int) and 1 < count < 1000:
                return count - 1  # SGLang counts the last committed token as a draft token
        return None

    def _states(self) -> list[dict[str, Any]]:
        """Return SGLang's description of itself and of its ranks."""
        answer = self._get("/get_server_info")
        try:
            info = {} if answer is None else answer.json()
        except ValueError:
            return []
        states = info.get("internal_states") if isinstance(info, dict) else None
        return [state for state in [info, *(states if isinstance(states, list) else [])] if isinstance(state, dict)]

    def _get(self, path: str) -> "httpx.Response | None":
        import httpx

        try:
            answer = self._client.get(self.root + path)
        except httpx.HTTPError as error:
            raise ConfigError(f"server {self.root}{path} cannot be reached ({reason_of(error)})") from error
        return answer if answer.status_code == 200 else None
