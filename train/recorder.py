"""Everything that a run writes while it trains: metrics, checkpoints and the best drafter; and the evaluation of it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.distill.cotraining import Adapters, adapted_fingerprint
from draftsmith.distill.dataset import HeldOut
from draftsmith.distill.load_target import LoadedTarget
from draftsmith.heads import TrainableDrafter
from draftsmith.heads.base import Drafter
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.provenance import environment, model_fingerprints
from draftsmith.storage import atomic_folder
from draftsmith.train.averaging import WeightAverage
from draftsmith.train.batch import ReadImages
from draftsmith.train.checkpoint import Progress, TrainState, load_from, load_state, load_step, prune, save_state
from draftsmith.train.context import RunContext
from draftsmith.train.engine import Engine, reduced
from draftsmith.train.interrupts import Stopping
from draftsmith.train.recipe import Recipe
from draftsmith.train.recipe_sections import EvaluationSection
from draftsmith.train.run_folder import (
    CHECKPOINTS,
    DRAFTER,
    FINISHED,
    METRICS,
    TARGET,
    Metrics,
    comparable,
    finish,
    is_lost,
    lost_for_good,
    read_metrics,
)
from draftsmith.train.step import Last

if TYPE_CHECKING:  # only some runs have them, and the decoder is imported by the first evaluation
    from draftsmith.decode.sequence import DecodeOutput
    from draftsmith.train.estimate.memory import MemoryEstimate
    from draftsmith.train.publishing import Publisher
    from draftsmith.train.trackers import Tracker


class BestDrafter:
    """Atomically saves the drafter with the highest measured acceptance length, with the target's adapters if any."""

    def __init__(self, recipe: Recipe, target: LoadedTarget, drafter: TrainableDrafter, draft_length: int) -> None:
        """To be created before adapters are added to the target, whose fingerprint is the original target's."""
        self.tau, self.step, self.averaged = 0.0, 0, False
        self.adapters: Adapters | None = None
        self._recipe, self._target, self._drafter, self._draft_length = recipe, target, drafter, draft_length
        self._described: dict[str, Any] = describe_target(target.model, target.tokenizer, target.name, target.revision)
        self._base_fingerprints = model_fingerprints(target.model)

    def offer(self, step: int, result: dict[str, Any], averaged: bool = False) -> None:
        """Save the drafter when its tau is the highest so far and its target is within `cotrain.max_quality_kl`.

        `averaged`: its weights are averages at present.
        """
        quality, cotrain = result.get("target_quality"), self._recipe.cotrain
        fits = quality is None or cotrain is None or quality["kl"] <= cotrain.max_quality_kl
        if result["tau"] > self.tau and fits:
            self.save(quality)
            self.tau, self.step, self.averaged = result["tau"], step, averaged

    def save(self, quality: dict[str, Any] | None) -> None:
        """Save the current drafter; `quality`: measured on a target that is trained too, see `measure_quality`."""
        folder, target = Path(self._recipe.output), self._target
        if self.adapters is not None:
            assert quality is not None, "an adapted target's quality is part of every evaluation"
            tensors = self.adapters.tensors()
            own, in_float16 = (adapted_fingerprint(base, tensors) for base in self._base_fingerprints)
            name = f"{target.name} with the adapter {self._recipe.name}"
            self._described |= {"name": name, "model_fingerprint": own, "quality": quality}
            self._described["float16_fingerprint"] = in_float16
            with atomic_folder(folder / TARGET) as temporary:
                self.adapters.save(temporary, target.name, quality)
                target.tokenizer.save_pretrained(temporary)
        with atomic_folder(folder / DRAFTER) as temporary:
            save_drafter(
                self._drafter,
                temporary,
                target=self._described,
                recipe=self._recipe.model_dump(mode="json", exclude={"publish"}),
                draft_length=self._draft_length,
                tokenizer=target.tokenizer,
            )


class DrafterEvaluation(NamedTuple):
    """Metrics over all held-out prompts, and the decoded texts."""

    metrics: dict[str, Any]
    """`alpha`, `tau` and `acceptance_at`; `tokens` and `rounds` by prompt; `target_quality` where the target is trained
    too."""
    outputs: "list[DecodeOutput]"


def evaluate_drafter(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: list[HeldOut],
    settings: EvaluationSection,
    draft_length: int,
    stop: Callable[[], bool] = lambda: False,
    read_images: ReadImages | None = None,
) -> DrafterEvaluation | None:
    """Decode all prompts one by one with the current drafter; `read_images`: see `collate`.

    Returns None as soon as `stop`, called before each prompt, is true: a machine that is about to be shut down may not
    have the time for a whole evaluation.
    """
    from draftsmith.decode.decoder import SpeculativeDecoder
    from draftsmith.decode.sequence import acceptance_at

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
        output = decoder.generate(prompt.input_ids, inputs=inputs, **options)
        outputs.append(output)
    drafter.train(was_training)
    rounds = [record for output in outputs for record in output.rounds]
    overlaps = [value for record in rounds for value in record.overlap]
    result = {
        "alpha": sum(overlaps) / max(1, len(overlaps)),
        # Without a round, if every text ends with its first token: the least tau, so that the first drafter is saved.
        "tau": sum(output.decode_tokens for output in outputs) / len(rounds) if rounds else 1.0,
        "tokens": [output.decode_tokens for output in outputs],
        "rounds": [len(output.rounds) for output in outputs],
        "acceptance_at": acceptance_at(rounds),
    }
    return DrafterEvaluation(result, outputs)


SAMPLES = 3
"""Decoded texts that a tracker shows."""


class Record:
    """Writes a run's files on the main process; the other processes wait for it in `meet`."""

    def __init__(self, context: RunContext, best: BestDrafter) -> None:
        self.best, self.stopping = best, Stopping()
        self.publisher: Publisher | None = None
        self._context, self._recipe, self._console = context, context.recipe, context.console
        self._folder = Path(self._recipe.output)
        self._main = context.accelerator.is_main_process
        self._saved: int | None = None
        self._tracker: Tracker | None = None
        if self._recipe.publish is not None:
            from draftsmith.train import publishing

            self.publisher = publishing.Publisher(self._recipe, self._recipe.publish, self._console)

    def resume(self, engine: Engine, average: WeightAverage | None) -> Progress | None:
        """Restore the last checkpoint, or the one to continue from, and return its progress; None without one."""
        self._engine, self._average = engine, average
        progress, problems = load_state(self._folder / CHECKPOINTS, self._load)
        for problem in problems:
            self._console.say(problem)
        if progress is not None:
            self._console.say(f"{self._recipe.name}: resuming after step {progress.step}")
            self._saved = progress.step
            self.best.tau, self.best.step = progress.best_tau, progress.best_step
            self.best.averaged = progress.best_averaged
        elif (source := self._recipe.continue_from) is not None:
            progress = load_from(Path(source).expanduser(), self._load)
            self._console.say(f"{self._recipe.name}: continuing {source}, after step {progress.step}")
        if self._main:
            with self._writing(METRICS):
                self._metrics = Metrics(self._folder, self._saved, progress is None or progress.evaluated)
        self.meet()
        if self._main and self._saved is not None:
            # The run may have been killed between writing one and deleting another.
            with self._writing(CHECKPOINTS):
                prune(self._folder / CHECKPOINTS, self._saved, self._recipe.train.keep_checkpoints)
        if self._recipe.tracker != "none":
            from draftsmith.train import trackers

            self._tracker = trackers.Tracker(self._context, self._saved)
        return progress

    def _load(self, state: TrainState) -> None:
        if self._average is not None:
            self._average.load(state)
        self._engine.load(state)

    def log(self, row: dict[str, Any]) -> None:
        """Write a row to the metrics and to the tracker."""
        if self._main:
            with self._writing(METRICS):
                self._metrics.write(row)
        if self._tracker is not None:
            self._tracker.log(row)

    def show(self, step: int, evaluation: DrafterEvaluation, tokenizer: PreTrainedTokenizerBase) -> None:
        """Show decoded texts and a chart of an evaluation in the tracker."""
        if self._tracker is not None:
            acceptance_at = evaluation.metrics["acceptance_at"]
            self._tracker.show(step, acceptance_at, evaluation.outputs[:SAMPLES], tokenizer)

    def offer(self, step: int, result: dict[str, Any], averaged: bool) -> None:
        """Save the drafter if it is the best by this evaluation, and publish it where the recipe says so."""
        with self._writing(DRAFTER):
            self.best.offer(step, result, averaged)
        if self.publisher is not None and self.best.tau and self.stopping.problem is None:
            self.publisher.keep_up(self.best.step)

    def checkpoint(self, step: int, last: Last, evaluated: bool, end: int | None) -> None:
        """Save a checkpoint, unless the newest one is of this step. `end`: see `Progress`."""
        if step == self._saved:
            return
        state = self._engine.state()
        if self._main:
            best = self.best
            progress = Progress(step, best.tau, best.step, last.alpha, last.quality_kl, evaluated, best.averaged, end)
            if self._average is not None:
                state = replace(state, average={name: mean.cpu() for name, mean in self._average.weights.items()})
            recipe, keep = comparable(self._recipe), self._recipe.train.keep_checkpoints
            with self._writing(CHECKPOINTS):
                self._metrics.sync()
                save_state(self._folder / CHECKPOINTS, progress, recipe, state, keep)
        self.meet()
        self._saved = step

    def restore(self) -> None:
        """Write the best drafter again from its checkpoint, if its folder was deleted; called at the end of the run.

        Raises:
            DraftsmithError: on all processes, where that checkpoint has been deleted too.
        """
        lost = self._main and self.best.tau > 0 and is_lost(self._recipe)
        if not broadcast_object_list([lost])[0]:
            return
        step, drafter = self.best.step, self._folder / DRAFTER
        if not load_step(self._folder / CHECKPOINTS, step, self._load):
            raise lost_for_good(self._folder, step)
        with self._engine.gathered():
            if self._main:
                key = "average" if self.best.averaged else "evaluation"
                rows = [row for row in read_metrics(self._folder) if row["step"] == step and key in row]
                with self._writing(DRAFTER), self.weights(self.best.averaged):
                    self.best.save(rows[-1][key].get("target_quality") if rows else None)
        self.meet()
        self._console.say(f"{drafter} was deleted: written again from the checkpoint of step {step}")

    def weights(self, averaged: bool) -> AbstractContextManager[None]:
        """Return the context in which the drafter has its averaged weights, or its own."""
        return self._average.in_place() if averaged and self._average is not None else nullcontext()

    def finish(self, steps: int, peak: int, estimate: "MemoryEstimate | None") -> None:
        """Write the run's summary, and print what more steps would bring and where the time went.

        `peak`: the most bytes that this start of the run has used.
        """
        if self._main:
            from draftsmith.eval.learning_curve import outlook, time_split  # the measurement: loaded at the end alone

            memory = {"peak_bytes": peak, "estimated_bytes": None if estimate is None else estimate.announced}
            best = self.best
            summary = {"best_step": best.step, "best_tau": best.tau, "best_averaged": best.averaged, "steps": steps}
            metrics = read_metrics(self._folder)
            for text in filter(None, (outlook(metrics), time_split(metrics))):
                self._console.say(f"  {text}")
            with self._writing(FINISHED):
                finish(self._folder, {**summary, "memory": memory, "environment": environment()})
        self.meet()

    def meet(self) -> None:
        """Wait for all processes, and agree with them on whether to continue."""
        accelerator = self._context.accelerator
        flags = torch.tensor(self.stopping.flags(), device=accelerator.device)
        self.stopping.agree(reduced(accelerator, flags).tolist())

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Stop the run on all processes, where they meet next, if file `name` cannot be written.

        Continuing would lose more: every further step cannot be saved either and has to be repeated, and a run that
        has stopped is noticed sooner than a line in its output.
        """
        try:
            yield
        except Exception as error:
            if not isinstance(error, OSError | SafetensorError) and type(error) is not Exception:  # tokenizers' own
                raise
            kept = "no checkpoint yet" if self._saved is None else f"the checkpoint of step {self._saved}"
            best = f" and the best drafter, of step {self.best.step}" if self.best.tau else ""
            self.stopping.problem = (
                f"{self._folder / name} cannot be written ({error}); kept: {kept}{best}. Once there is room, the same "
                "command continues from there"
            )
