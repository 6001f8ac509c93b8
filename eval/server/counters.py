"""The counters of a server's drafts, and the descriptions that engines give of themselves.

Engines count their drafts. vLLM and llama-server count draft tokens and accepted tokens by position, too; SGLang counts
verifications. They are Prometheus counters of the whole server, so other requests during a measurement count too. A
reading that fails is an error, since zeros in its place would turn totals since the server's start into differences.
"""

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit, urlunsplit

from draftsmith.distill.data_section import server_key
from draftsmith.distill.server.client import opened
from draftsmith.errors import ConfigError, reason_of

if TYPE_CHECKING:
    import httpx

LABEL = r'\s*(?P<{0}>[A-Za-z_]\w*)\s*=\s*"(?P<{1}>(?:[^"\\]|\\.)*)"\s*'
"""A label of a sample; its value may hold braces, commas and escaped quotes."""
ANY_LABEL = re.sub(r"\?P<[^>]*>", "?:", LABEL)
SAMPLE = re.compile(rf"^(?P<name>[A-Za-z_:][\w:]*)(?:\s*\{{(?P<labels>(?:{ANY_LABEL},?)*)\s*\}}\s*|\s+)(?P<value>\S+)")
LABELS = re.compile(LABEL.format("name", "value"))
ROUNDS = ("vllm:spec_decode_num_drafts", "llamacpp:spec_decode_num_drafts", "sglang:spec_verify_calls")
DRAFT_TOKENS = ("vllm:spec_decode_num_draft_tokens", "llamacpp:spec_decode_num_draft_tokens")
PER_POSITION = ("vllm:spec_decode_num_accepted_tokens_per_pos", "llamacpp:spec_decode_num_accepted_tokens_per_pos")
GENERATED = ("vllm:generation_tokens", "llamacpp:tokens_predicted", "sglang:generation_tokens")
"""Counters that exist without speculation, too; they distinguish a server without drafts from one without metrics."""
READ = (*ROUNDS, *DRAFT_TOKENS, *PER_POSITION, *GENERATED)
MOST_POSITIONS = 1000
SECONDS = 30.0
READINGS = 5
"""Tries of a reading that fails, with growing pauses: about five seconds."""
REDIRECTS = 3
PASSING = (408, 425, 429)
"""Statuses below 500 that may pass; 501 lasts: llama-server without --metrics."""
SETTLE_SECONDS = 0.2
"""Time between two readings of counters that have to agree: engines update them after an answer."""
SETTLE_READINGS = 50


@dataclass(frozen=True)
class Counters:
    """Numbers of a server since its start."""

    known: bool
    """The server has counters at all."""
    rounds: float = 0.0
    """Verified drafts of all texts."""
    accepted: tuple[float, ...] = ()
    """By draft position, drafts that were accepted up to it; empty where the engine does not count positions."""
    drafted: float | None = None
    """Draft tokens; None where the engine does not count them."""
    why: str = field(default="", compare=False)
    """The reason where they are not known."""
    absent: bool = field(default=False, compare=False)
    """The server has no such route, so that the next reading says the same."""

    def since(self, before: "Counters") -> "Counters":
        """Return the difference; ConfigError if one of both is not known, or the server was started again."""
        if self.known != before.known:
            why = self.why or before.why
            raise ConfigError(
                f"server's /metrics were not read each time ({why}); expected its counters in each reading"
            )
        earlier = (*before.accepted, *([0.0] * len(self.accepted)))
        accepted = tuple(now - then for now, then in zip(self.accepted, earlier, strict=False))
        drafted = None if self.drafted is None else self.drafted - (before.drafted or 0.0)
        counts = (self.rounds - before.rounds, *accepted, drafted or 0.0)
        gone = len(self.accepted) < len(before.accepted) or (drafted is None and before.drafted is not None)
        if gone or any(count < 0 for count in counts):
            raise ConfigError("server's counters have decreased: it was started again; expected one that keeps running")
        return Counters(self.known, counts[0], accepted, drafted, self.why)


def parse_counters(text: str) -> Counters:
    """Return the numbers in Prometheus' text format, summed over engines and ranks."""
    known, rounds, drafted, accepted = False, 0.0, list[float](), dict[int, float]()
    for line in text.splitlines():
        match = SAMPLE.match(line)
        name = "" if match is None else match["name"].removesuffix("_total")
        if match is None or name not in READ:
            continue
        value = _number(match["value"])
        if value is None:
            return Counters(False, why=f"{name} is no number")
        known |= name in GENERATED + ROUNDS
        rounds += value if name in ROUNDS else 0.0
        drafted += [value] if name in DRAFT_TOKENS else []
        labels = dict(LABELS.findall(match["labels"] or "")) if name in PER_POSITION else {}
        if (place := labels.get("position", "")).isdecimal() and int(place) < MOST_POSITIONS:
            accepted[int(place)] = accepted.get(int(place), 0.0) + value
    if not known:
        return Counters(False, why="no counters of vLLM, SGLang or llama-server")
    positions = tuple(accepted.get(place, 0.0) for place in range(max(accepted, default=-1) + 1))
    return Counters(True, rounds, positions, sum(drafted) if drafted else None)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < 1e300 else None


LOSSY_METHODS = ("fly", "synthetic", "typical_acceptance_sampler")
"""vLLM's ways to verify that do not keep the target's distribution; standard, strict, probabilistic and block do."""
LOSSY_BELOW_ONE = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
"""SGLang's thresholds from which draft tokens are accepted without a test, if below 1."""


class CounterRoutes:
    """The routes of a server's counters, beside OpenAI's."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.root = urlunsplit((parts.scheme, parts.netloc, parts.path.removesuffix("/v1"), "", ""))
        import httpx

        headers = {"Authorization": f"Bearer {server_key()}"} if server_key() else {}
        self._client = opened(httpx.Client, url, headers=headers, timeout=SECONDS)

    def counters(self) -> Counters:
        """Return the counters now; those of a server without the route are not known.

        Raises:
            ConfigError: for a route that fails in each of `READINGS` tries.
        """
        reason = ""
        for number in range(READINGS):
            time.sleep(SETTLE_SECONDS * (2**number - 1))
            reason, answer = self._get("/metrics")
            if answer is not None and answer.status_code == 200:
                return parse_counters(answer.text)
            status = 500 if answer is None else answer.status_code
            if status == 501 or (status < 500 and status not in PASSING):
                return Counters(False, why=reason, absent=True)
        raise ConfigError(
            f"server {self.root}/metrics fails ({reason}); expected its counters, or status 404 without any"
        )

    def sglang_tau(self) -> float | None:
        """Return SGLang's mean acceptance length since its start; None if it does not report it."""
        for state in self._states():
            value = state.get("avg_spec_accept_length")
            if isinstance(value, int | float) and 1 <= value < 1e6:
                return float(value)
        return None

    def lossy_options(self) -> list[str]:
        """Return the options with which the server changes the distribution, where it describes itself.

        vLLM does with VLLM_SERVER_DEV_MODE=1, SGLang always.
        """
        config = self._json("/server_info?config_format=json").get("vllm_config")
        section = config.get("speculative_config") if isinstance(config, dict) else None
        method = section.get("rejection_sample_method") if isinstance(section, dict) else None
        found = [f"rejection_sample_method={method}"] if method in LOSSY_METHODS else []
        for state in self._states():
            values = {key: state.get(key) for key in LOSSY_BELOW_ONE}
            below = {key: value for key, value in values.items() if isinstance(value, int | float) and value < 1}
            found += [f"{key}={value:g}" for key, value in below.items()]
        return list(dict.fromkeys(found))

    def _states(self) -> list[dict[str, Any]]:
        """Return SGLang's description of itself and of its ranks."""
        info = self._json("/get_server_info")
        states = info.get("internal_states")
        return [state for state in [info, *(states if isinstance(states, list) else [])] if isinstance(state, dict)]

    def _json(self, path: str) -> dict[str, Any]:
        """Return the object at a route; an empty one where the server has none."""
        _, answer = self._get(path)
        try:
            info = answer.json() if answer is not None and answer.status_code == 200 else None
        except ValueError:
            return {}
        return info if isinstance(info, dict) else {}

    def _get(self, path: str) -> "tuple[str, httpx.Response | None]":
        """Return the answer, after redirects on the same host, with its status in words; the reason without one."""
        import httpx

        url = self.root + path
        try:
            answer = self._client.get(url)
            for _ in range(REDIRECTS):
                place = urlsplit(urljoin(url, answer.headers.get("Location", "")))
                if not answer.is_redirect or place.hostname != urlsplit(url).hostname:
                    break
                # Proxies change scheme and port: what is asked stays the address of the user, who trusts it with a key.
                ours = urlsplit(url)
                url = urlunsplit((ours.scheme, ours.netloc, place.path, place.query, ""))
                answer = self._client.get(url)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # the last: of a Location
            return f"cannot be reached: {reason_of(error)}", None
        return f"status {answer.status_code}", answer


async def settled(routes: CounterRoutes) -> Counters:
    """Return the counters once two readings agree; ConfigError if no two of `SETTLE_READINGS` do."""
    last = await asyncio.to_thread(routes.counters)
    for _ in range(SETTLE_READINGS):
        if last.absent:
            return last
        await asyncio.sleep(SETTLE_SECONDS)
        before, last = last, await asyncio.to_thread(routes.counters)
        if last == before:
            return last
    raise ConfigError(
        f"server {routes.root} answers other requests: its counters changed in each of {SETTLE_READINGS} readings; "
        "expected none during a measurement"
    )
