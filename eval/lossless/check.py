"""Is this pair lossless on this machine? Every drafter, policy and temperature, each with its evidence and verdict.

How a check is shown: a table a drafter, and one sentence on what follows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import PreTrainedModel

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.sampling import Sampling
from draftsmith.eval.lossless.draws import Done, Plan
from draftsmith.eval.lossless.greedy import Divergence, GreedyCheck, check_greedy
from draftsmith.eval.lossless.sampling import JOINT, POWER, SamplingCheck, check_sampling
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.settings import PairSettings
from draftsmith.eval.stages import stage
from draftsmith.heads.base import Drafter
from draftsmith.provenance import environment, model_fingerprint
from draftsmith.safe_text import Terminal

SCHEMA = 1
ALPHA = 1e-3
"""The chance that a run over lossless drafters calls any of them lossy."""
GREEDY_TOKENS = 96
CALIBRATION = 4
LOSSLESS, LOSSY, INCONCLUSIVE = "lossless", "lossy", "inconclusive"
Verdict = Literal["lossless", "lossy", "inconclusive"]


@dataclass(frozen=True)
class CheckSettings(PairSettings):
    """Settings of a check; runs with equal settings make the same draws."""

    count: int | None = 12
    draft_length: int | None = None
    tokens: int = 10_000
    """Tokens sampled with the rule, and as many with the control, for each drafter, policy and temperature."""


@dataclass(frozen=True)
class VariantCheck:
    """One drafter under one policy at one temperature: either kind of evidence, and what follows from it."""

    drafter: str
    policy: str
    rule: str
    temperature: float
    verdict: Verdict
    greedy: GreedyCheck | None = None
    sampling: SamplingCheck | None = None


@dataclass(frozen=True)
class Check:
    """All of it, as `check.json` holds it."""

    settings: CheckSettings
    environment: dict[str, Any]
    target_fingerprint: str
    arms: list[VariantCheck] = field(default_factory=list)
    finished: bool = False

    @property
    def verdict(self) -> Verdict:
        """The worst of the arms'; inconclusive until all are there."""
        verdicts = {arm.verdict for arm in self.arms}
        if LOSSY in verdicts:
            return LOSSY
        return LOSSLESS if verdicts == {LOSSLESS} and self.finished else INCONCLUSIVE

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "verdict": self.verdict, "alpha": ALPHA, **asdict(self)}


def check(
    target: PreTrainedModel,
    drafters: dict[str, Drafter],
    prompts: list[Prompt],
    settings: CheckSettings,
    *,
    keep: Callable[[Check], None] = lambda _: None,
    progress: bool = True,
) -> Check:
    """Check every drafter, under every policy, at every temperature.

    Args:
        keep: called with all that is known after each arm, so that an interrupted run keeps what it has.
        progress: the stages on stderr, the longest with a bar in tokens and the time that is left.
    """
    with stage("preparing the decoders", shown=progress):
        decoders = _decoders(target, drafters, prompts, settings)
    sampled = sum(temperature > 0 for temperature in settings.temperatures) * len(decoders)
    checked = Check(settings, environment(), model_fingerprint(target))
    alone: list[list[int]] = []
    with _bar(_work(decoders, prompts, settings), progress) as done:
        if 0 in settings.temperatures:
            alone = _target_alone(target, prompts, done)
        for (name, policy), decoder in decoders.items():
            for temperature in settings.temperatures:
                head = {"drafter": name, "policy": policy, "temperature": temperature}
                if temperature == 0:
                    greedy = check_greedy(target, decoder, prompts, alone, max_new_tokens=GREEDY_TOKENS, done=done)
                    arm = VariantCheck(**head, rule="greedy", verdict=_greedy_verdict(greedy), greedy=greedy)
                else:
                    plan = _plan(prompts, settings, temperature)
                    sampling = check_sampling(target, decoder, plan, ALPHA / sampled, done)
                    rule = settings.rule or "best lossless"
                    arm = VariantCheck(**head, rule=rule, verdict=sampling.verdict, sampling=sampling)
                checked.arms.append(arm)
                keep(checked)
    finished = Check(settings, checked.environment, checked.target_fingerprint, checked.arms, finished=True)
    keep(finished)
    return finished


def _greedy_verdict(greedy: GreedyCheck) -> Verdict:
    """Near ties are rounding; where nothing was drafted nothing was tested."""
    if greedy.bugs:
        return LOSSY
    return LOSSLESS if greedy.drafted else INCONCLUSIVE


def _decoders(
    target: PreTrainedModel, drafters: dict[str, Drafter], prompts: list[Prompt], settings: CheckSettings
) -> dict[tuple[str, str], SpeculativeDecoder]:
    """By drafter and policy; policies that learn have seen a few texts."""
    decoders = {}
    for name, drafter in drafters.items():
        for policy in settings.policies or (None,):
            length = settings.draft_length if policy is None else None
            decoder = SpeculativeDecoder(target, drafter, draft_length=length, policy=policy, rule=settings.rule)
            for temperature in settings.temperatures:
                cuts = {"top_k": settings.top_k, "top_p": settings.top_p} if temperature > 0 else {}
                decoder.calibrate([p.input_ids for p in prompts[:CALIBRATION]], temperature=temperature, **cuts)
            shown = f"at most {drafter.max_draft_length}" if decoder.policy is None else str(decoder.policy)
            decoders[(name, shown)] = decoder  # a drafter that only retrieves is the same under every policy
    return decoders


def _target_alone(target: PreTrainedModel, prompts: list[Prompt], done: Done) -> list[list[int]]:
    """The target's own greedy text for each prompt, one token a pass."""
    decoder, texts = SpeculativeDecoder(target), []
    for prompt in prompts:
        texts.append(decoder.generate(prompt.input_ids, max_new_tokens=GREEDY_TOKENS).tokens)
        done(len(texts[-1]))
    return texts


def _plan(prompts: list[Prompt], settings: CheckSettings, temperature: float) -> Plan:
    return Plan(prompts, Sampling(temperature, settings.top_k, settings.top_p), settings.tokens, settings.seed)


def _work(decoders: dict, prompts: list[Prompt], settings: CheckSettings) -> int:
    """Tokens that the whole check decodes, roughly: texts may end early."""
    total = 0
    for temperature in settings.temperatures:
        if temperature == 0:
            total += (len(decoders) + 1) * len(prompts) * GREEDY_TOKENS
        else:
            total += 2 * len(decoders) * _plan(prompts, settings, temperature).work
    return total


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Done]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Terminal(stderr=True), disable=not shown) as bar:
        task = bar.add_task("checking", total=total)
        yield lambda tokens: bar.advance(task, tokens)


def sampling_table(arm: VariantCheck, sampling: SamplingCheck) -> Table:
    """Every test of one sampled arm, the rule's beside the negative control's; fits 100 columns."""
    title = f"{arm.drafter} ({arm.policy}), rule {arm.rule}, T={arm.temperature:g}: {arm.verdict.upper()}"
    table = Table(title=title, pad_edge=False)
    table.add_column("test", no_wrap=True)
    for name in ("n", "statistic", "p, adjusted", f"finds {POWER:.0%}", "control's p"):
        table.add_column(name, justify="right")
    for test, control in zip(sampling.rule.tests, sampling.control.tests, strict=True):
        table.add_row(
            test.name,
            f"{test.count:,}",
            f"{test.statistic:.4g}",
            _mark(test.adjusted, sampling.level),
            f"{test.detects:.2g}",
            _mark(control.adjusted, sampling.level),
        )
    return table


def _mark(p_value: float, level: float) -> str:
    shown = f"{p_value:.2g}"
    return f"[bold red]{shown} *[/]" if p_value < level else f"{shown}  "


def sentences(checked: Check) -> list[str]:
    """What follows for each arm, plainly."""
    lines = []
    for arm in checked.arms:
        if arm.greedy is not None:
            lines += _greedy(arm, arm.greedy)
        if arm.sampling is not None:
            lines += _sampling(arm, arm.sampling)
    return lines


def _greedy(arm: VariantCheck, greedy: GreedyCheck) -> list[str]:
    name = f"{arm.drafter} ({arm.policy}) at T=0"
    if not greedy.drafted:
        return [f"{name}: INCONCLUSIVE: nothing was drafted; more or longer prompts are needed."]
    ties = len(greedy.divergences) - len(greedy.bugs)
    line = (
        f"{name}: {arm.verdict.upper()}: {greedy.identical} of {greedy.prompts} greedy texts are the target's own, "
        f"{greedy.tokens:,} tokens; {ties} near ties, {len(greedy.bugs)} tokens that no rounding explains."
    )
    first = next(iter(greedy.bugs or greedy.divergences), None)
    return [line] if first is None else [line, _divergence(first)]


def _divergence(found: Divergence) -> str:
    where = f"  First {found.kind}: prompt {found.prompt}, new token {found.position}: "
    if found.gap is None:
        return where + "one text ends there and the other goes on."
    return where + (
        f"{found.token} where the target alone has {found.expected}; its logit lies {found.gap:.3g} below the largest "
        f"(top-2 margin {found.margin:.3g}), and rounding explains {found.bound:.3g}."
    )


def _sampling(arm: VariantCheck, sampling: SamplingCheck) -> list[str]:
    name = f"{arm.drafter} ({arm.policy}) at T={arm.temperature:g}"
    if arm.verdict == "lossy":
        worst = min(sampling.rule.tests, key=lambda test: test.adjusted)
        return [f"{name}: LOSSY: {worst.name}, p = {worst.adjusted:.2g} after Holm's correction."]
    if arm.verdict == "inconclusive":
        return [f"{name}: INCONCLUSIVE: {_why_inconclusive(sampling)}"]
    caught = min(sampling.control.tests, key=lambda test: test.adjusted)
    joint = next(test for test in sampling.rule.tests if test.name == JOINT)
    every = sampling.rule.tests[0]
    return [
        f"{name}: LOSSLESS as far as {sampling.rule.tokens:,} tokens can show. With probability {POWER:g} they would "
        f"have shown a total variation of {joint.detects:.2g} in the first tokens behind a prompt, and a shift of "
        f"{every.detects:.2g} over all tokens; the lossy control they did show (p = {caught.adjusted:.2g}). "
        f"A run over lossless drafters fails once in {1 / ALPHA:,.0f}."
    ]


def _why_inconclusive(sampling: SamplingCheck) -> str:
    if not sampling.rule.drafted:
        return "nothing was drafted; other prompts are needed."
    if not sampling.control.found(sampling.level):
        return "the lossy control was not found either; more --tokens are needed."
    return "the rule is known to be lossy, and was not found; more --tokens are needed."
