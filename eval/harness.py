"""The measurement: every drafter and the target alone on the same prompts, interleaved, in one process and engine."""

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.output import DecodeOutput
from draftsmith.decode.timing import measure_costs
from draftsmith.errors import ConfigError
from draftsmith.eval.metrics import Measured, greedy_identity, row_numbers
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.threads import fastest_threads, threads
from draftsmith.heads.drafter import Drafter
from draftsmith.provenance import environment

SCHEMA = 1
Arm = tuple[str, str]
"""A drafter's name and its policy."""
BASELINE: Arm = ("target alone", "")
WARM_UP_TOKENS = 16
CALIBRATION = 4
REPETITIVE = 0.3
"""Share of repeated 4-grams above which a report warns; source code itself has about 0.05."""


@dataclass(frozen=True)
class Settings:
    """What a run measures; two runs with equal settings are the same measurement made again."""

    target: str
    drafters: dict[str, str]
    """Name in the table: folder or Hub id."""
    prompts: str
    count: int | None = None
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_new_tokens: int = 96
    draft_length: int | None = None
    policies: tuple[str, ...] = ()
    """How drafts grow, each measured with each drafter; without any, every drafter's own chain."""
    rule: str | None = None
    """The verification rule of sampled decoding; without one, the best lossless for each draft."""
    top_k: int | None = None
    top_p: float | None = None
    repeats: int = 3
    seed: int = 0
    dtype: str = "float32"


@dataclass(frozen=True)
class Evaluation:
    """Rows of `eval.json`, what they were measured on, and a few words on how far to trust them."""

    settings: Settings
    rows: list[dict[str, Any]]
    environment: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "rows": self.rows,
            "environment": self.environment,
            "settings": asdict(self.settings),
            "notes": self.notes,
        }


def evaluate(
    target: nn.Module, drafters: dict[str, Drafter], prompts: list[Prompt], settings: Settings, *, progress: bool = True
) -> Evaluation:
    """Measure every drafter against the target alone.

    For each repeat, temperature and prompt all arms decode one after the other, and the arm that begins
    changes from prompt to prompt, so that a slow second of the machine hits all alike. Decode time only; the prefill is
    reported apart.
    """
    if not prompts:
        raise ConfigError("prompts=0; expected at least 1")
    count = fastest_threads(target, prompts[0].input_ids)
    with threads(count):  # decoders are built here, because policies plan with costs that depend on threads
        arms = _arms(target, drafters, settings)
        learned = _calibrate(arms, prompts, settings)
        measured = _measure(arms, prompts, settings, progress)
        where = environment()
    rows = []
    for arm, decoder in arms.items():
        if arm == BASELINE:
            continue
        for temperature in settings.temperatures:
            head = {
                "drafter": arm[0],
                "drafter_type": decoder.drafter.type,
                "policy": arm[1],
                "rule": settings.rule or "best lossless",
                "lossless": decoder.lossless or temperature == 0,
                "temperature": temperature,
            }
            rows += _rows(head, measured[(BASELINE, temperature)], measured[(arm, temperature)])
    notes = _notes(rows, len(prompts)) + _quality_notes(drafters)
    if learned:
        notes.append(
            f"Policies that learn ({', '.join(learned)}) began with what {CALIBRATION} of the prompts taught them."
        )
    return Evaluation(settings, rows, where, notes)


def _arms(target: nn.Module, drafters: dict[str, Drafter], settings: Settings) -> dict[Arm, SpeculativeDecoder]:
    """The target alone, and every drafter with every policy."""
    arms = {BASELINE: SpeculativeDecoder(target)}
    for name, drafter in drafters.items():
        costs = measure_costs(target, drafter)
        for policy in settings.policies or (None,):
            plan = {"draft_length": settings.draft_length} if policy is None else {"policy": policy}
            decoder = SpeculativeDecoder(target, drafter, rule=settings.rule, costs=costs, **plan)
            plan = f"at most {drafter.max_draft_length}" if decoder.policy is None else str(decoder.policy)
            arms[(name, plan)] = decoder  # a drafter that only retrieves is the same under every policy
    return arms


def _calibrate(arms: dict[Arm, SpeculativeDecoder], prompts: list[Prompt], settings: Settings) -> list[str]:
    """Let policies that learn see a few texts at each temperature, untimed; the names of those policies."""
    learners = {arm: decoder for arm, decoder in arms.items() if decoder.learns}
    for decoder in learners.values():
        for temperature in settings.temperatures:
            cuts = {"top_k": settings.top_k, "top_p": settings.top_p} if temperature > 0 else {}
            rows = [prompt.input_ids for prompt in prompts[:CALIBRATION]]
            decoder.calibrate(rows, max_new_tokens=settings.max_new_tokens, temperature=temperature, **cuts)
    return sorted({arm[1] for arm in learners})


def _measure(
    arms: dict[Arm, SpeculativeDecoder], prompts: list[Prompt], settings: Settings, progress: bool
) -> dict[tuple[Arm, float], list[Measured]]:
    """Every arm at every temperature on every prompt, `repeats` times."""

    def decode(arm: Arm, prompt: Prompt, temperature: float, seed: int, tokens: int) -> DecodeOutput:
        return arms[arm].generate(
            prompt.input_ids,
            max_new_tokens=tokens,
            temperature=temperature,
            top_k=settings.top_k if temperature > 0 else None,
            top_p=settings.top_p if temperature > 0 else None,
            seed=seed,
        )

    for arm in arms:  # first calls allocate and choose kernels; they are not measured
        for temperature in settings.temperatures:
            decode(arm, prompts[0], temperature, 0, WARM_UP_TOKENS)
    measured: dict[tuple[Arm, float], list[Measured]] = {(a, t): [] for a in arms for t in settings.temperatures}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("measuring", total=settings.repeats * len(settings.temperatures) * len(prompts) * len(arms))
        for repeat in range(settings.repeats):
            for temperature in settings.temperatures:
                for number, prompt in enumerate(prompts):
                    first = (number + repeat) % len(arms)
                    for arm in [*arms][first:] + [*arms][:first]:
                        # Another seed each time: one lucky text must not decide a sampled row.
                        seed = settings.seed + 10_007 * repeat + number
                        output = decode(arm, prompt, temperature, seed, settings.max_new_tokens)
                        measured[(arm, temperature)].append(Measured(prompt, repeat, output))
                        bar.advance(task)
    return measured


def _rows(head: dict[str, Any], baseline: list[Measured], speculative: list[Measured]) -> list[dict[str, Any]]:
    """The row over all prompts and, where there are several categories, one for each."""
    categories = sorted({run.prompt.category for run in speculative})
    groups = {"all": (baseline, speculative)}
    if len(categories) > 1:
        for category in categories:
            groups[category] = tuple(
                [run for run in runs if run.prompt.category == category] for runs in (baseline, speculative)
            )
    rows = []
    for category, (base, spec) in groups.items():
        row = {**head, "category": category, **row_numbers(base, spec)}
        if head["temperature"] == 0:
            row |= greedy_identity(base, spec)
        rows.append(row)
    return rows


def _quality_notes(drafters: dict[str, Drafter]) -> list[str]:
    """A drafter that was trained with its target drafts for another p than the original's."""
    return [
        f"{name}: its target was trained with it and is not the original: KL {quality['kl']:.4f} nats a token, loss on "
        f"held-out text {quality['nll_original']:.3f} -> {quality['nll_adapted']:.3f} nats, same favourite token at "
        f"{quality['top1_agreement']:.1%} of positions. Texts are lossless relative to this target."
        for name, drafter in drafters.items()
        if (quality := drafter.target_quality) is not None
    ]


def _notes(rows: list[dict[str, Any]], prompts: int) -> list[str]:
    """What a reader should know before quoting a number."""
    notes = []
    if prompts < 20:
        notes.append(f"Measured on {prompts} prompts: differences of a few percent mean little.")
    for row in rows:
        if row["category"] != "all":
            continue
        name = f"{row['drafter']} ({row['policy']}) at T={row['temperature']:g}"
        if not row["lossless"]:
            notes.append(
                f"{name}: rule {row['rule']!r} is LOSSY: this is not the target's text, only something near it."
            )
        if row["speedup"] < 1:
            notes.append(f"{name} is slower than the target alone ({row['speedup']:.2f}x).")
        if row["speedup"] > row["tau"]:
            notes.append(f"{name}: a speedup above tau is impossible but for noise; measure again on a quiet machine.")
        spread = max(row["speedup_repeats"], default=0) - min(row["speedup_repeats"], default=0)
        if row["speedup"] and spread > 0.2 * row["speedup"]:
            notes.append(f"{name}: repeats differ by {spread:.2f}x; the machine was not quiet.")
        if row["repeated_4grams"] > REPETITIVE:
            notes.append(
                f"{name}: {row['repeated_4grams']:.0%} of the 4-grams stood in the same text before. The target goes "
                "in circles there, which is easy to draft: a less repetitive text gains less."
            )
        equal, total = row.get("greedy_identical", (0, 0))
        if equal < total:
            notes.append(
                f"{name}: {total - equal} of {total} greedy texts part from the target's own, first at "
                f"{row['first_divergence']}; a near tie in its logits does that, and so would a bug."
            )
    return notes
