"""The losslessness check: statistics and verdict of every drafter, policy and temperature, and their presentation."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.table import Table
from transformers import PreTrainedModel

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.sampling import Sampling
from draftsmith.errors import ConfigError
from draftsmith.eval.lossless.greedy import Divergence, GreedyCheck, check_greedy
from draftsmith.eval.lossless.hypotheses import ALL_TOKENS, JOINT, POWER, SamplingCheck
from draftsmith.eval.lossless.sampled_texts import Done, SamplingJob, check_sampling
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.session import fingerprints
from draftsmith.eval.settings import ANOTHER, CheckSettings, require_same_run
from draftsmith.heads.base import Drafter
from draftsmith.provenance import environment
from draftsmith.terminal import Bars, Terminal, TimeLeft, markdown, stage

SCHEMA = 1
ALPHA = 1e-3
"""Probability that a run over lossless drafters calls any of them lossy."""
GREEDY_TOKENS = 96
CALIBRATION = 4
SERVED_RULE = "the server's"
LOSSLESS, LOSSY, INCONCLUSIVE = "lossless", "lossy", "inconclusive"
Verdict = Literal["lossless", "lossy", "inconclusive"]


@dataclass(frozen=True)
class ArmCheck:
    """A drafter with a policy at a temperature: the greedy or the sampling check, and the verdict."""

    drafter: str
    policy: str
    rule: str
    temperature: float
    verdict: Verdict
    greedy: GreedyCheck | None = None
    sampling: SamplingCheck | None = None


@dataclass(frozen=True)
class Check:
    """The content of `check.json`."""

    settings: CheckSettings
    environment: dict[str, Any]
    """Of the first start."""
    fingerprints: dict[str, Any]
    """See `draftsmith.eval.session.fingerprints`; of a server the target's alone, or its name."""
    arms: list[ArmCheck] = field(default_factory=list)
    finished: bool = False
    notes: list[str] = field(default_factory=list)
    """The parts that were not tested, and the reasons."""

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all arms; inconclusive until the check is finished."""
        verdicts = {arm.verdict for arm in self.arms}
        if LOSSY in verdicts:
            return LOSSY
        return LOSSLESS if verdicts == {LOSSLESS} and self.finished else INCONCLUSIVE

    def as_json(self) -> dict[str, Any]:
        values = asdict(self) | {"settings": self.settings.model_dump()}
        values["target_fingerprint"] = self.fingerprints["target"]  # as versions before 0.5 named it
        return {"schema": SCHEMA, "verdict": self.verdict, "alpha": ALPHA, **values}

    def continued(self, stored: dict[str, Any], out: Path) -> "Check":
        """Return this check with the arms that an earlier start has finished, unless that was a version before 0.5.

        Args:
            stored: the content of `check.json` in `out`.

        Raises:
            ConfigError: naming the first value in which the two starts differ.
        """
        if "fingerprints" not in stored:
            return self
        try:
            environment, arms = stored["environment"], TypeAdapter(list[ArmCheck]).validate_python(stored["arms"])
            before = {**stored["fingerprints"], "settings": stored["settings"], "environment": _lasting(environment)}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"out={out} holds a check.json that is not ours; expected {ANOTHER}") from error
        facts = {**self.fingerprints, "environment": _lasting(self.environment)}
        require_same_run(before, self.settings, out, facts, "check")
        return replace(self, environment=environment, arms=arms)


def _lasting(environment: dict[str, Any]) -> dict[str, Any]:
    """Return the machine and the versions, which a verdict is about."""
    return {key: value for key, value in environment.items() if key not in ("date", "command", "torch_threads")}


def check(
    target: PreTrainedModel,
    drafters: dict[str, Drafter],
    prompts: list[Prompt],
    settings: CheckSettings,
    *,
    notes: Sequence[str] = (),
    resume: Callable[[Check], Check] = lambda new: new,
    keep: Callable[[Check], None] = lambda _: None,
) -> Check:
    """Check every drafter, under every policy, at every temperature.

    Args:
        notes: see `Check`.
        resume: returns the new check with the arms of an earlier start, see `Check.continued`.
        keep: called with the results so far after each arm, so that an interrupted run keeps them.
    """
    identity = fingerprints(target, drafters, prompts)
    checked = resume(Check(settings, environment(), identity, notes=list(notes)))
    with stage("preparing the decoders"):
        decoders = _decoders(target, drafters, prompts, settings)
    sampled = sum(temperature > 0 for temperature in settings.temperatures) * len(decoders)
    finished = {(arm.drafter, arm.policy, arm.temperature) for arm in checked.arms}
    pending = [key for key in product(decoders, settings.temperatures) if (*key[0], key[1]) not in finished]
    temperatures = [temperature for _, temperature in pending]
    alone: list[list[int]] = []
    with _bar(_work(temperatures, prompts, settings)) as done:
        if 0 in temperatures:
            alone = _target_alone(SpeculativeDecoder(target, invariant=settings.invariant), prompts, done)
        for (name, policy), temperature in pending:
            decoder = decoders[name, policy]
            head = {"drafter": name, "policy": policy, "temperature": temperature}
            if temperature == 0:
                greedy = check_greedy(target, decoder, prompts, alone, max_new_tokens=GREEDY_TOKENS, done=done)
                arm = ArmCheck(**head, rule="greedy", verdict=greedy_verdict(greedy), greedy=greedy)
            else:
                job = _job(prompts, settings, temperature)
                sampling = check_sampling(target, decoder, job, ALPHA / sampled, done)
                rule = settings.rule or "best lossless"
                arm = ArmCheck(**head, rule=rule, verdict=sampling.verdict, sampling=sampling)
            checked.arms.append(arm)
            keep(checked)
    whole = replace(checked, finished=True)
    keep(whole)
    return whole


def greedy_verdict(greedy: GreedyCheck) -> Verdict:
    """Return lossy for any bug, and inconclusive if nothing was drafted, or a difference could not be judged."""
    if greedy.bugs:
        return LOSSY
    return INCONCLUSIVE if greedy.drafted == 0 or greedy.not_judged else LOSSLESS


def _decoders(
    target: PreTrainedModel,
    drafters: dict[str, Drafter],
    prompts: list[Prompt],
    settings: CheckSettings,
) -> dict[tuple[str, str], SpeculativeDecoder]:
    """Return a decoder for each drafter and policy; policies that learn are calibrated on a few texts."""
    decoders = {}
    for name, drafter in drafters.items():
        for policy in settings.policies_of(name) or (None,):
            length = settings.draft_length if policy is None else None
            options = {"draft_length": length, "policy": policy, "rule": settings.rule}
            decoder = SpeculativeDecoder(target, drafter, **options, **settings.passes)
            for temperature in settings.temperatures:
                cuts = {"top_k": settings.top_k, "top_p": settings.top_p} if temperature > 0 else {}
                rows, inputs = zip(*((p.input_ids, p.inputs) for p in prompts[:CALIBRATION]), strict=True)
                decoder.calibrate(rows, inputs=inputs, temperature=temperature, **cuts)
            shown = f"at most {drafter.max_draft_length}" if decoder.policy is None else str(decoder.policy)
            decoders[(name, shown)] = decoder  # drafters that only retrieve ignore the policy
    return decoders


def _target_alone(decoder: SpeculativeDecoder, prompts: list[Prompt], done: Done) -> list[list[int]]:
    """Return the target's own greedy text for each prompt; `decoder` has no drafter."""
    texts = []
    for prompt in prompts:
        output = decoder.generate(prompt.input_ids, inputs=prompt.inputs, max_new_tokens=GREEDY_TOKENS)
        texts.append(output.tokens)
        done(len(texts[-1]))
    return texts


def _job(prompts: list[Prompt], settings: CheckSettings, temperature: float) -> SamplingJob:
    return SamplingJob(prompts, Sampling(temperature, settings.top_k, settings.top_p), settings.tokens, settings.seed)


def _work(temperatures: list[float], prompts: list[Prompt], settings: CheckSettings) -> int:
    """Return the approximate number of tokens that arms at these temperatures decode; texts may end early."""
    greedy = len(prompts) * GREEDY_TOKENS
    works = [2 * _job(prompts, settings, each).work if each > 0 else greedy for each in temperatures]
    return sum(works) + greedy * (0 in temperatures)


@contextmanager
def _bar(total: int) -> Iterator[Done]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeLeft())
    with Bars(*columns, console=Terminal(stderr=True)) as bar:
        task = bar.add_task("checking", total=total)
        yield lambda tokens: bar.advance(task, tokens)


def sampling_table(arm: ArmCheck, sampling: SamplingCheck) -> Table:
    """Return a table of all tests of one sampled arm, next to those of the control; it fits 100 columns."""
    title = f"{arm.drafter} ({arm.policy}), rule {arm.rule}, T={arm.temperature:g}: {arm.verdict.upper()}"
    table = Table(title=title, pad_edge=False)
    table.add_column("test", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for cells in _rows(sampling):
        table.add_row(*cells)
    return table


COLUMNS = ("n", "statistic", "p, adjusted", f"detects {POWER:.0%}", "control's p")


def _rows(sampling: SamplingCheck) -> list[list[str]]:
    """Return the cells of the table of tests; a star marks what is rejected."""

    def marked(p_value: float) -> str:
        return f"{p_value:.2g} *" if p_value < sampling.level else f"{p_value:.2g}  "

    return [
        [t.name, f"{t.count:,}", f"{t.statistic:.4g}", marked(t.adjusted), f"{t.detects:.2g}", marked(control.adjusted)]
        for t, control in zip(sampling.rule.tests, sampling.control.tests, strict=True)
    ]


def sentences(checked: Check) -> list[str]:
    """Return the verdict on each arm in sentences."""
    lines, reference = [], "target" if checked.settings.baseline is None else "baseline"
    for arm in checked.arms:
        if arm.greedy is not None:
            lines += _greedy(arm, arm.greedy, reference)
        if arm.sampling is not None:
            lines += _sampling(arm, arm.sampling)
    return [*lines, *checked.notes]


def _greedy(arm: ArmCheck, greedy: GreedyCheck, reference: str) -> list[str]:
    name = f"{arm.drafter} ({arm.policy}) at T={arm.temperature:g}"
    if greedy.drafted == 0 and not greedy.bugs:
        return [f"{name}: INCONCLUSIVE: nothing was drafted; more or longer prompts are needed."]
    ties = len(greedy.divergences) - len(greedy.bugs) - len(greedy.not_judged)
    unknown = f"; {len(greedy.not_judged)} not judged" if greedy.not_judged else ""
    line = (
        f"{name}: {arm.verdict.upper()}: {greedy.identical} of {greedy.prompts} greedy texts are the "
        f"{reference}'s own, {greedy.tokens:,} tokens; {ties} near ties, {len(greedy.bugs)} tokens that no rounding "
        f"explains{unknown}."
    )
    first = next(iter(greedy.bugs or greedy.not_judged or greedy.divergences), None)
    return [line] if first is None else [line, _divergence(first, reference)]


def _divergence(first: Divergence, reference: str) -> str:
    where = f"  First {first.kind}: prompt {first.prompt}, new token {first.position}: "
    if first.token is None and first.expected is not None:
        return where + f"the text ends there, and the {reference} alone continues with token {first.expected}."
    if first.expected is None:
        return where + "one text ends there and the other continues."
    if first.failure is not None:
        return where + (
            f"token {first.token} where the {reference} has token {first.expected}; the pass in twice the precision "
            f"failed ({first.failure})."
        )
    if first.gap is None:
        return where + f"token {first.token} where the {reference} has token {first.expected}."
    return where + (
        f"token {first.token} where the target alone has token {first.expected}; its logit is {first.gap:.3g} below "
        f"the largest (top-2 margin {first.margin:.3g}), and rounding explains {first.bound:.3g}."
    )


def _sampling(arm: ArmCheck, sampling: SamplingCheck) -> list[str]:
    name = f"{arm.drafter} ({arm.policy}) at T={arm.temperature:g}"
    if arm.verdict == "lossy":
        worst = min(sampling.rule.tests, key=lambda test: test.adjusted)
        return [f"{name}: LOSSY: {worst.name}, p = {worst.adjusted:.2g} after Holm's correction."]
    if arm.verdict == "inconclusive":
        return [f"{name}: INCONCLUSIVE: {_why_inconclusive(arm, sampling)}"]
    caught = min(sampling.control.tests, key=lambda test: test.adjusted)
    detects = {test.name: test.detects for test in sampling.rule.tests}
    shift = f", and a shift of {detects[ALL_TOKENS]:.2g} over all tokens" if ALL_TOKENS in detects else ""
    return [
        f"{name}: LOSSLESS as far as {sampling.rule.tokens:,} tokens can show. With probability {POWER:g} they would "
        f"have shown a total variation of {detects[JOINT]:.2g} in the first tokens after a prompt{shift}; "
        f"they did show the lossy control (p = {caught.adjusted:.2g}). "
        f"A run over lossless drafters fails once in {1 / ALPHA:,.0f}."
    ]


def _why_inconclusive(arm: ArmCheck, sampling: SamplingCheck) -> str:
    if sampling.failure is not None:
        return f"not judged: the pass in twice the precision failed ({sampling.failure})."
    if sampling.rule.drafted == 0:
        return "nothing was drafted; other prompts are needed."
    if not sampling.control.rejects(sampling.level):
        return "the lossy control was not detected either; more --tokens are needed."
    if arm.rule == SERVED_RULE:
        return "its answers are all alike."
    return "the rule is known to be lossy and was not detected; more --tokens are needed."


def report(checked: Check) -> str:
    """Return the verdict, its sentences and the tests as Markdown."""
    settings = checked.settings
    lines = [f"# {checked.verdict.upper()}: {', '.join(map(markdown, settings.drafters))}", ""]
    lines += [f"- {markdown(' '.join(line.split()))}" for line in sentences(checked)]
    for arm in checked.arms:
        if arm.sampling is not None and arm.sampling.failure is None:
            lines += ["", f"## Tests at T={arm.temperature:g}: {markdown(arm.drafter)}, {markdown(arm.policy)}", ""]
            lines += [f"| test | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
            lines += [f"| {' | '.join(markdown(cell.strip()) for cell in cells)} |" for cells in _rows(arm.sampling)]
    where = checked.environment
    conditions = {"target": settings.target, "drafters": ", ".join(settings.drafters.values())}
    conditions |= {"baseline": settings.baseline or "", "prompts": settings.prompts, "dtype": settings.dtype}
    conditions |= {"date": where["date"], "command": where["command"]}
    lines += ["", "## Conditions", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {markdown(value)} |" for key, value in conditions.items() if value]
    return "\n".join(lines) + "\n"
