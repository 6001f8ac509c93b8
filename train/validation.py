"""Measurements during training: acceptance on held-out prompts, the validation loss; early ends by them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from draftsmith.distill.dataset import HeldOut
from draftsmith.distill.teacher import Batch
from draftsmith.heads.base import Drafter, TrainableDrafter
from draftsmith.metrics import RESAMPLES, acceptance_at, alpha, percentiles, position_counts, ratio, tau
from draftsmith.terminal import interval
from draftsmith.train.engine import reduced
from draftsmith.train.launch import RunContext
from draftsmith.train.process import Stopping
from draftsmith.train.recipe_sections import EvaluationSection, TrainSection
from draftsmith.train.step import Last, ReadImages, StepSums, Teacher
from draftsmith.train.training_data import TrainingData

if TYPE_CHECKING:  # the decoder is imported by the first evaluation
    from draftsmith.decode.sequence import DecodeOutput
    from draftsmith.eval.teacher_forced import TargetText

# Shapes: K draft positions, E evaluations, P held-out prompts, S resamples of the prompts.


def _alpha(outputs: "Sequence[DecodeOutput]") -> float:
    overlaps = [value for output in outputs for value in output.overlaps]
    return alpha(sum(overlaps), len(overlaps))


def _tau(outputs: "Sequence[DecodeOutput]") -> float:
    """Return 1, the least tau, without a round, if every text ends with its first token: the first drafter is saved."""
    rounds = [len(output.rounds) for output in outputs]
    return tau([output.decode_tokens for output in outputs], rounds) if any(rounds) else 1.0


METRICS: "dict[str, Callable[[Sequence[DecodeOutput]], float | list[float]]]" = {
    "alpha": _alpha,
    "tau": _tau,
    "tokens": lambda outputs: [output.decode_tokens for output in outputs],
    "rounds": lambda outputs: [len(output.rounds) for output in outputs],
    "acceptance_at": lambda outputs: acceptance_at(position_counts(output.rounds) for output in outputs),
}
"""Metrics of the decoded texts, by their key in `metrics.jsonl` and in trackers."""


def tau_by_source(result: Mapping[str, Any], sources: Sequence[str]) -> dict[str, float]:
    """Return tau by the source of the prompts of an evaluation; `sources`: the label of each prompt's.

    A source of which no text has a round is left out.
    """
    tokens, rounds = Counter[str](), Counter[str]()
    for source, committed, passes in zip(sources, result["tokens"], result["rounds"], strict=True):
        tokens[source] += committed
        rounds[source] += passes
    return {source: tau(tokens[source], rounds[source]) for source in rounds if rounds[source]}


def evaluate_drafter(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: list[HeldOut],
    settings: EvaluationSection,
    draft_length: int,
    stop: Callable[[], bool] = lambda: False,
    read_images: ReadImages | None = None,
) -> dict[str, Any] | None:
    """Decode all prompts one by one with the current drafter, and return `METRICS` of the texts.

    `read_images`: see `collate`.

    Returns None as soon as `stop`, called before each prompt, is true: a machine that is about to be shut down may not
    have the time for a whole evaluation.
    """
    from draftsmith.decode.decoder import SpeculativeDecoder

    was_training = drafter.training
    drafter.eval()
    decoder = SpeculativeDecoder(target, drafter, draft_length=draft_length)
    outputs: list[DecodeOutput] = []
    for number, prompt in enumerate(prompts):
        if stop():
            drafter.train(was_training)
            return None
        inputs = None if read_images is None else read_images(prompt.images, prompt.input_ids)
        options = {"max_new_tokens": settings.max_new_tokens, "temperature": settings.temperature, "seed": number}
        outputs.append(decoder.generate(prompt.input_ids, inputs=inputs, **options))
    drafter.train(was_training)
    return {name: metric(outputs) for name, metric in METRICS.items()}


@torch.no_grad()
def estimate_acceptance(
    teacher: Teacher,
    drafter: TrainableDrafter,
    data: TrainingData,
    settings: EvaluationSection,
    draft_length: int,
    batch: Callable[[list[int]], Batch],
) -> dict[str, Any]:
    """Return `METRICS` that are expected on answers of validation rows; nothing is decoded.

    For a target without layers. The text of a row is its first answer. At temperature 0 a draft token counts as
    accepted where the drafter's argmax is the target's, at others by the block rule.

    Raises:
        ConfigError: see `unrollable`.
    """
    from draftsmith.decode.sampling import Processors, Sampling
    from draftsmith.eval.forecast.expected_rounds import block_rule, matched, walk
    from draftsmith.eval.teacher_forced import agreement_of, overlap_measure, unrollable

    rows = [row for row in range(data.trained, len(data.rows)) if data.rows[row]["spans"]][: settings.count]
    texts = [_first_answer(data, row) for row in rows]
    was_training, own = drafter.training, unrollable(drafter.eval(), draft_length, texts)
    positions = min(draft_length, drafter.max_draft_length or draft_length)
    measure = overlap_measure(Processors(Sampling(temperature=settings.temperature)))
    tokens, rounds, overlaps, tested, accepted = (
        list[int](),
        list[float](),
        list[float](),
        [0.0] * positions,
        [0.0] * positions,
    )
    for row, text in zip(rows, texts, strict=True):
        one = batch([row])
        if not one.mask_BT.any() or not text.anchors:
            continue
        one.mask_BT[:] = False
        one.mask_BT[0, text.prompt_length : len(text.tokens) - 1] = True
        (stats,) = agreement_of(teacher.signals(one), teacher.lm_head, own, [text], positions, measure)
        greedy = settings.temperature == 0
        survival_AK = matched(stats["match"] > 0) if greedy else block_rule(stats["log_p"], stats["log_q"])
        visits_A, tested_K, accepted_K = walk(survival_AK, np.full(text.anchors, positions))
        tokens.append(text.anchors)
        rounds.append(float(visits_A.sum()))
        overlaps += stats["overlap"][:, 0].tolist()
        tested, accepted = (np.add(total, new) for total, new in ((tested, tested_K), (accepted, accepted_K)))
    drafter.train(was_training)
    return {
        "alpha": alpha(sum(overlaps), len(overlaps)),
        "tau": tau(tokens, rounds) if rounds else 1.0,
        "tokens": tokens,
        "rounds": rounds,
        "acceptance_at": (np.asarray(accepted) / np.maximum(tested, 1e-9)).tolist(),
        "estimated": True,
    }


def _first_answer(data: TrainingData, row: int) -> "TargetText":
    """Return the text of a row up to the end of its first answer."""
    from draftsmith.eval.teacher_forced import TargetText

    ids, (start, end) = data.rows[row]["input_ids"], data.rows[row]["spans"][0]
    return TargetText(ids[:end], start, end)


def validation_rows(data: TrainingData, excluded: Sequence[int]) -> list[int]:
    """Return the indices of the validation rows, without those that are excluded."""
    return [row for row in range(data.trained, len(data.rows)) if row not in excluded]


@torch.no_grad()
def validate(
    context: RunContext,
    module: nn.Module,
    data: TrainingData,
    step: int,
    last: Last,
    *,
    batch: Callable[[list[int]], Batch],
    stopping: Stopping,
    meet: Callable[[], None],
    expect: Callable[[list[list[int]]], None] | None = None,
) -> dict[str, Any] | None:
    """Return the mean objective, alpha and top-1 agreement over the validation rows, the same on all processes.

    Of several sources alpha is returned by source, too. Returns None without such rows, and where a signal came.

    Args:
        batch: returns the rows of these indices.
        module: the step in its engine.
        meet: waits for all processes, which then agree in `stopping` on whether to continue.
        expect: of a teacher that reads ahead; called with this process's rows of each batch.
    """
    rows, settings = validation_rows(data, context.recipe.data.exclude_rows), context.recipe.train
    shares, share = context.text_share
    size = settings.batch_size // (shares * settings.gradient_accumulation)
    totals: dict[str, StepSums] = {}
    tokens = 0
    if not rows:
        return None
    module.eval()
    batches = [
        (label, at_once[share * size : (share + 1) * size], len(at_once))
        for label, at_once in _batches(data, rows, shares * size)
    ]
    if expect is not None:
        expect([mine for _, mine, _ in batches if mine])
    begin = 0
    for label, mine, count in batches:
        torch.manual_seed(begin + share)  # block drafters draw the positions that they are trained at
        begin += count
        # All processes run the same passes, as sharded weights need; one without rows of its own counts none.
        texts = batch(mine or [rows[0]])
        tokens += int(texts.mask_BT.sum()) if mine else 0
        sums: StepSums = module(texts, step / settings.steps, last)
        sums = StepSums(*(value if mine else torch.zeros_like(value) for value in sums))
        totals[label] = sums.plus(totals.get(label))
        meet()
        if stopping.agreed is not None:
            break
    module.train()
    if isinstance(module, FSDPModule):
        module.reshard()  # in training the backward pass does
    if stopping.agreed is not None:
        return None
    whole, alpha_by_source = None, dict[str, list[float]]()
    for label, of_source in totals.items():
        sums = StepSums(*(reduced(context.accelerator, value) for value in of_source))
        alpha_by_source[label] = (sums.alpha_K / sums.count_K.clamp_min(1)).tolist()
        whole = sums.plus(whole)
    assert whole is not None, "there are rows"
    count_K = whole.count_K.clamp_min(1)
    together = context.accelerator.num_processes // shares  # processes that share texts
    trained = reduced(context.accelerator, count_K.new_tensor(tokens, dtype=torch.long)).item() // together
    return {
        "loss": whole.loss.item() / max(1, trained),
        "alpha": (whole.alpha_K / count_K).tolist(),
        "top1": (whole.match_K / count_K).tolist(),
        **({"alpha_by_source": alpha_by_source} if len(totals) > 1 else {}),
    }


def _batches(data: TrainingData, rows: list[int], size: int) -> Iterator[tuple[str, list[int]]]:
    """Yield the rows in batches of one source, with its label; of packed rows, which mix sources, with ''."""
    sources = data.rows["source"] if "source" in data.rows.column_names else None
    by_source: dict[str, list[int]] = {}
    for row in rows:
        by_source.setdefault("" if sources is None else data.sources[sources[row]], []).append(row)
    for label, own in by_source.items():
        for begin in range(0, len(own), size):
            yield label, own[begin : begin + size]


class TauEstimate(NamedTuple):
    """Tau, or the difference of two, and its 95 % interval over the choice of prompts."""

    value: float
    interval: list[float]

    def __str__(self) -> str:
        return f"{self.value:.2f} {interval(self.interval, 2)}"


def tau_estimate(tokens_P: NDArray, rounds_P: NDArray) -> TauEstimate:
    """Return tau of an evaluation."""
    taus_S1 = _resampled_taus(tokens_P[None], rounds_P[None])
    return TauEstimate(tau(tokens_P, rounds_P), percentiles(taus_S1[:, 0]))


def tau_rise(tokens_EP: NDArray, rounds_EP: NDArray, window: int) -> TauEstimate | None:
    """Return tau over the last `window` evaluations minus tau over the `window` before them, on the same prompts.

    None with fewer evaluations.
    """
    if len(tokens_EP) < 2 * window:
        return None
    sums = [counts[-2 * window :].reshape(2, window, -1).sum(1) for counts in (tokens_EP, rounds_EP)]
    before, after = ratio(*(total.sum(1) for total in sums))
    taus_S2 = _resampled_taus(*sums)
    return TauEstimate(float(after - before), percentiles(taus_S2[:, 1] - taus_S2[:, 0]))


def _resampled_taus(tokens_EP: NDArray, rounds_EP: NDArray) -> NDArray:
    """Return tau of each evaluation over resampled prompts, [S, E]."""
    prompts = tokens_EP.shape[1]
    drawn_SP = np.random.default_rng(0).multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)
    return ratio(drawn_SP @ tokens_EP.T, drawn_SP @ rounds_EP.T)


def early_end(
    settings: TrainSection, metrics: Sequence[Mapping[str, Any]], step: int, decaying: bool
) -> tuple[int, str] | None:
    """Return the run's last step by its evaluations up to `step`, and why; None where it continues as planned.

    A run with the schedule 'wsd' ends after its decay, which begins now. `decaying`: it has begun already.
    """
    target, window = settings.target_tau, settings.patience
    evaluations = [row["evaluation"] for row in metrics if "evaluation" in row]
    if not evaluations or len(evaluations[0]["tokens"]) < 2:  # an interval over prompts needs several
        return None
    tokens_EP, rounds_EP = (np.array([row[name] for row in evaluations], float) for name in ("tokens", "rounds"))
    if target is not None and (last := tau_estimate(tokens_EP[-1], rounds_EP[-1])).interval[0] >= target:
        return step, f"tau {last} has reached train.target_tau={target:g}"
    rise = None if window is None or decaying else tau_rise(tokens_EP, rounds_EP, window)
    if rise is None or rise.interval[0] > 0:
        return None
    reason = f"tau has stopped rising: {rise.value:+.2f} {interval(rise.interval, 2)} "
    reason += f"from {window} evaluations to the next {window}"
    end = step + settings.decay_steps if settings.schedule == "wsd" else step
    return None if end >= settings.steps else (end, reason)


def by_source(data: TrainingData, row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return samples, trained tokens, tau of held-out prompts and alpha in validation by source, as far as known.

    `row`: that of an evaluation in `metrics.jsonl`.
    """
    statistics: dict[str, dict[str, Any]] = {
        label: {"samples": samples, "trained_tokens": tokens} for label, (samples, tokens) in data.counts.items()
    }
    for label in dict.fromkeys(data.heldout_sources):
        held = [number for number, own in enumerate(data.heldout_sources) if own == label]
        tokens_P, rounds_P = (np.array(row["evaluation"][name], dtype=float)[held] for name in ("tokens", "rounds"))
        statistics.setdefault(label, {})["prompts"] = len(held)
        if rounds_P.any():
            measured = tau_estimate(tokens_P, rounds_P)
            statistics[label] |= {"tau": measured.value, "interval": measured.interval}
    for label, alpha_K in row.get("validation", {}).get("alpha_by_source", {}).items():
        statistics[label]["validation_alpha"] = alpha_K
    return statistics


def table_by_source(statistics: Mapping[str, Mapping[str, Any]], step: int) -> Table:
    """Return the statistics of `by_source` as a table; `step`: that of the evaluation."""
    table = Table(title=f"By source, step {step}: trained; tau of held-out prompts; alpha in validation")
    table.add_column("source", overflow="fold")
    for column in ("samples", "tokens", "prompts", "tau", "alpha"):
        table.add_column(column, justify="right", no_wrap=True)
    for label, own in statistics.items():
        counts = (f"{own[name]:,}" if name in own else "" for name in ("samples", "trained_tokens", "prompts"))
        table.add_row(
            label, *counts, _tau_of(own), f"{own['validation_alpha'][0]:.3f}" if "validation_alpha" in own else ""
        )
    return table


def _tau_of(own: Mapping[str, Any]) -> str:
    if "tau" not in own:
        return ""
    return f"{own['tau']:.2f}" + (f" {interval(own['interval'], 2)}" if own["prompts"] > 1 else "")
