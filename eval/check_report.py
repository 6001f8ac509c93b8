"""How a check is shown: a table a drafter, and one sentence on what follows."""

from rich.table import Table

from draftsmith.eval.check import ALPHA, Arm, Check
from draftsmith.eval.greedy_check import Divergence
from draftsmith.eval.sampling_check import JOINT, POWER, SamplingCheck


def sampling_table(arm: Arm) -> Table:
    """Every test of one sampled arm, the rule's beside the negative control's; fits 100 columns."""
    sampling = arm.sampling
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
    return [line for arm in checked.arms for line in (_greedy(arm) if arm.greedy else _sampling(arm))]


def _greedy(arm: Arm) -> list[str]:
    greedy, name = arm.greedy, f"{arm.drafter} ({arm.policy}) at T=0"
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


def _sampling(arm: Arm) -> list[str]:
    sampling, name = arm.sampling, f"{arm.drafter} ({arm.policy}) at T={arm.temperature:g}"
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
