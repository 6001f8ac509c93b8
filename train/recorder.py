"""What a run leaves on disk while it goes: metrics, checkpoints and the best drafter.

The best drafter so far, by measured tau: what a run is for, kept whole on disk.

The periodic evaluation: decode held-out prompts with the drafter as it is now.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch import nn

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.sequence import DecodeOutput, acceptance_at
from draftsmith.distill.cotraining import Adapters, adapted_fingerprint
from draftsmith.distill.load_target import LoadedTarget
from draftsmith.heads import TrainableDrafter
from draftsmith.heads.base import Drafter
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.provenance import environment, model_fingerprints
from draftsmith.storage import atomic_folder
from draftsmith.train.checkpoint import Progress, load_state, load_step, prune, save_state
from draftsmith.train.engine import Engine
from draftsmith.train.estimate.memory import MemoryEstimate
from draftsmith.train.interrupts import Stopping
from draftsmith.train.progress import Console
from draftsmith.train.publishing import Publisher
from draftsmith.train.recipe import EvaluationSection, Recipe
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
from draftsmith.train.trackers import Tracker


class BestDrafter:
    """Writes the drafter, and the adapters of the target it belongs to where there are some, into the run's folder."""

    def __init__(self, recipe: Recipe, target: LoadedTarget, drafter: TrainableDrafter, draft_length: int) -> None:
        """To be made before there are adapters on the target: its fingerprint is the original's."""
        self.tau, self.step = 0.0, 0
        self.adapters: Adapters | None = None
        self._recipe, self._target, self._drafter, self._draft_length = recipe, target, drafter, draft_length
        self._described = describe_target(target.model, target.tokenizer, target.name, target.revision)
        self._base_fingerprints = model_fingerprints(target.model)

    def offer(self, step: int, result: dict[str, Any]) -> None:
        """Keep the drafter as it is when its tau is the best so far, and its target has not moved too far."""
        quality = result.get("target_quality")
        fits = quality is None or quality["kl"] <= self._recipe.cotrain.max_quality_kl
        if result["tau"] > self.tau and fits:
            self.save(quality)
            self.tau, self.step = result["tau"], step

    def save(self, quality: dict[str, Any] | None) -> None:
        """Write the drafter as it is; `quality`: what was measured of a target that is trained too."""
        folder, target = Path(self._recipe.output), self._target
        if self.adapters is not None:
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


def evaluate_drafter(
    target: nn.Module,
    drafter: Drafter,
    prompts: list[list[int]],
    settings: EvaluationSection,
    draft_length: int,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Any], list[DecodeOutput]] | None:
    """Measured `alpha`, `tau` and `acceptance_at` over all prompts, decoded one by one; and the decoded texts.

    None when `stop`, which is asked before each prompt, says so: an evaluation may take longer than a machine that is
    about to go away leaves.
    """
    was_training = drafter.training
    drafter.eval()
    decoder = SpeculativeDecoder(target, drafter, draft_length=draft_length)
    outputs: list[DecodeOutput] = []
    for number, prompt in enumerate(prompts):
        if stop():
            drafter.train(was_training)
            return None
        limits = {"max_new_tokens": settings.max_new_tokens, "temperature": settings.temperature}
        outputs.append(decoder.generate(prompt, **limits, seed=number))
    drafter.train(was_training)
    rounds = [record for output in outputs for record in output.rounds]
    overlaps = [value for record in rounds for value in record.overlap]
    result = {
        "alpha": sum(overlaps) / max(1, len(overlaps)),
        "tau": sum(output.decode_tokens for output in outputs) / max(1, len(rounds)),
        "acceptance_at": acceptance_at(rounds),
    }
    return result, outputs


SAMPLES = 3
"""Decoded texts that a tracker is shown."""


class Record:
    """Written by the main process; `meet` is where the others wait for it."""

    def __init__(self, recipe: Recipe, accelerator: Accelerator, console: Console, best: BestDrafter) -> None:
        self.best, self.stopping = best, Stopping()
        self._recipe, self._accelerator, self._console = recipe, accelerator, console
        self._folder = Path(recipe.output)
        self._main = accelerator.is_main_process
        self._saved: int | None = None
        self._tracker: Tracker | None = None
        self.publisher = Publisher(recipe, console)

    def resume(self, engine: Engine) -> Progress | None:
        """Put everything back to where the last checkpoint was written; None when there is none."""
        self._engine = engine
        progress, problems = load_state(self._folder / CHECKPOINTS, engine.load)
        for problem in problems:
            self._console.say(problem)
        if progress is not None:
            self._console.say(f"{self._recipe.name}: resuming behind step {progress.step}")
            self._saved = progress.step
            self.best.tau, self.best.step = progress.best_tau, progress.best_step
        if self._main:
            with self._writing(METRICS):
                self._metrics = Metrics(self._folder, self._saved)
        self.meet()
        if self._main and progress is not None:  # a kill may have come between writing one and deleting another
            with self._writing(CHECKPOINTS):
                prune(self._folder / CHECKPOINTS, progress.step, self._recipe.train.keep_checkpoints)
        self._tracker = Tracker(self._accelerator, self._recipe, self._console, self._saved)
        return progress

    def log(self, row: dict[str, Any]) -> None:
        if self._main:
            with self._writing(METRICS):
                self._metrics.write(row)
        self._tracker.log(row)

    def show(self, step: int, result: dict[str, Any], outputs: list[DecodeOutput], tokenizer: Any) -> None:
        """What a tracker can show of an evaluation beside its numbers."""
        self._tracker.show(step, result["acceptance_at"], outputs[:SAMPLES], tokenizer)

    def offer(self, step: int, result: dict[str, Any]) -> None:
        """Keep the drafter if this evaluation says that it is the best."""
        with self._writing(DRAFTER):
            self.best.offer(step, result)
        if self.best.tau and self.stopping.problem is None:
            self.publisher.keep_up(self.best.step)

    def checkpoint(self, step: int, last: Last, evaluated: bool) -> None:
        """Unless the newest one is of this very step."""
        if step == self._saved:
            return
        state = self._engine.state()
        if self._main:
            progress = Progress(step, self.best.tau, self.best.step, last.alpha, last.quality_kl, evaluated)
            recipe, keep = comparable(self._recipe), self._recipe.train.keep_checkpoints
            with self._writing(CHECKPOINTS):
                self._metrics.sync()
                save_state(self._folder / CHECKPOINTS, progress, recipe, state, keep)
        self.meet()
        self._saved = step

    def restore(self) -> None:
        """Write the best drafter again where its folder was deleted, from its checkpoint; to be called at the end.

        Raises:
            DraftsmithError: on all processes, where that checkpoint is not kept.
        """
        lost = self._main and self.best.tau > 0 and is_lost(self._recipe)
        if not broadcast_object_list([lost])[0]:
            return
        step, drafter = self.best.step, self._folder / DRAFTER
        if not load_step(self._folder / CHECKPOINTS, step, self._engine.load):
            raise lost_for_good(self._folder, step)
        with self._engine.gathered():
            if self._main:
                found = [row for row in read_metrics(self._folder) if row["step"] == step and "evaluation" in row]
                with self._writing(DRAFTER):
                    self.best.save(found[-1]["evaluation"].get("target_quality") if found else None)
        self.meet()
        self._console.say(f"{drafter} was deleted: written again from the checkpoint of step {step}")

    def finish(self, peak: int, estimate: MemoryEstimate | None) -> None:
        """`peak`: bytes that this start of the run has taken at its fullest."""
        if self._main:
            memory = {"peak_bytes": peak, "estimated_bytes": None if estimate is None else estimate.announced}
            told = {"best_step": self.best.step, "best_tau": self.best.tau, "memory": memory}
            told["environment"] = environment()
            with self._writing(FINISHED):
                finish(self._folder, told)
        self.meet()

    def meet(self) -> None:
        """Wait for all processes, and agree with them on whether to go on."""
        flags = torch.tensor(self.stopping.flags(), device=self._accelerator.device)
        self.stopping.agree(self._accelerator.reduce(flags, "sum").tolist())

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """What cannot be written stops the run, on all processes, where they meet next.

        Going on would lose more: each step that cannot be saved is one more to repeat, the loss curve lies on the same
        full disk, and a run that has stopped is noticed sooner than a line in its output.
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
                "command goes on from there"
            )
