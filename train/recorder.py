"""Files that a run writes while it trains: metrics, checkpoints, the best drafter, a tracker's."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from draftsmith.distill.cotraining import Adapters, adapted_fingerprint
from draftsmith.distill.load_target import LoadedTarget
from draftsmith.errors import ConfigError
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.provenance import environment, model_fingerprints
from draftsmith.storage import atomic_folder
from draftsmith.train.checkpoints import Progress, load_from, load_state, prune, save_state
from draftsmith.train.engine import Engine, reduced
from draftsmith.train.launch import RunContext
from draftsmith.train.process import Stopping
from draftsmith.train.progress import Tracker
from draftsmith.train.recipe import Recipe
from draftsmith.train.run_folder import (
    CHECKPOINTS,
    DRAFTER,
    FINISHED,
    METRICS,
    TARGET,
    append_metrics,
    finish,
    flush_metrics,
    read_metrics,
    restart_metrics,
    stored_values,
)
from draftsmith.train.step import Last
from draftsmith.train.training_data import TrainingData
from draftsmith.train.validation import by_source, table_by_source

if TYPE_CHECKING:
    from draftsmith.train.estimate.memory import MemoryEstimate


class BestDrafter:
    """Atomically saves the drafter with the highest measured acceptance length, with the target's adapters if any."""

    def __init__(
        self,
        recipe: Recipe,
        target: LoadedTarget,
        drafter: TrainableDrafter,
        draft_length: int,
        adapters: Adapters | None,
        engine: str | None,
    ) -> None:
        """`engine`: the command of the engine that computes the target's states; None without one."""
        self.tau, self.step = 0.0, 0
        self._recipe, self._target, self._drafter, self._draft_length = recipe, target, drafter, draft_length
        self._adapters = adapters
        self._described = describe_target(target.model, target.tokenizer, target.name, target.revision)
        if engine is not None:
            self._described["engine"] = engine

    def offer(self, step: int, result: dict[str, Any]) -> None:
        """Save the drafter when no earlier tau is higher and its target is within `cotrain.max_quality_kl`."""
        quality, cotrain = result.get("target_quality"), self._recipe.cotrain
        fits = quality is None or cotrain is None or quality["kl"] <= cotrain.max_quality_kl
        if result["tau"] >= self.tau and fits:
            self.save(quality)
            self.tau, self.step = result["tau"], step

    def save(self, quality: dict[str, Any] | None) -> None:
        """Save the current drafter; `quality`: measured on a target that is trained too, see `measure_quality`."""
        folder, target, described = Path(self._recipe.output), self._target, self._described
        if self._adapters is not None:
            assert quality is not None, "an adapted target's quality is part of every evaluation"
            tensors = self._adapters.tensors()
            own, in_float16 = (adapted_fingerprint(base, tensors) for base in model_fingerprints(target.model))
            name = f"{target.name} with the adapter {self._recipe.name}"
            described = {**described, "name": name, "model_fingerprint": own, "quality": quality}
            described["float16_fingerprint"] = in_float16
            with atomic_folder(folder / TARGET) as temporary:
                self._adapters.save(temporary, target.name, quality)
                target.tokenizer.save_pretrained(temporary)
        with atomic_folder(folder / DRAFTER) as temporary:
            save_drafter(
                self._drafter,
                temporary,
                target=described,
                recipe=self._recipe.model_dump(mode="json"),
                draft_length=self._draft_length,
                tokenizer=target.tokenizer,
            )


class Record:
    """Writes a run's files on the main process; the other processes wait for it in `meet`."""

    def __init__(
        self, context: RunContext, best: BestDrafter, engine: Engine, stopping: Stopping, fixed: dict[str, str]
    ) -> None:
        """Restore the last checkpoint, or the one to continue from, and open the metrics and the tracker.

        Args:
            fixed: see `fixed_tensors`, of the drafter that is trained here.

        Raises:
            ConfigError: for a checkpoint of a drafter with other fixed tensors.
            DraftsmithError: see `load_from`.
        """
        self.best, self.stopping = best, stopping
        self._context, self._recipe, self._console = context, context.recipe, context.console
        self._engine, self._fixed = engine, fixed
        self._folder = Path(self._recipe.output)
        self._main = context.accelerator.is_main_process
        self._saved: int | None = None
        self.progress = self._restored()
        """That of the checkpoint; None for a new run."""
        if self._main:
            with self._writing(METRICS):
                restart_metrics(self._folder, self._saved, self.progress is None or self.progress.evaluated)
        self.meet()
        if self._main and self._saved is not None:
            # The run may have been killed between writing one and deleting another.
            with self._writing(CHECKPOINTS):
                prune(self._folder / CHECKPOINTS, self._saved, self._recipe.train.keep_checkpoints)
        self._tracker = None
        if self._recipe.tracker != "none":
            self._tracker = Tracker(self._recipe, context.accelerator, self._console, self._saved)

    def _restored(self) -> Progress | None:
        """Restore the last checkpoint, or the one to continue from, and return its progress; None without one."""
        progress, problems = load_state(self._folder / CHECKPOINTS, self._engine.load)
        for problem in problems:
            self._console.say(problem)
        if progress is not None:
            self._require_fixed(progress, f"output={self._folder} holds")
            self._console.say(f"{self._recipe.name}: resuming after step {progress.step}")
            self._saved = progress.step
            progress = self._with_drafter(progress)
            self.best.tau, self.best.step = progress.best_tau, progress.best_step
        elif (source := self._recipe.continue_from) is not None:
            progress = load_from(Path(source).expanduser(), self._engine.load)
            self._require_fixed(progress, f"continue_from={source} is")
            self._console.say(f"{self._recipe.name}: continuing {source}, after step {progress.step}")
        return progress

    def _with_drafter(self, progress: Progress) -> Progress:
        """Return the progress of a run whose best drafter is on disk; where it is gone, this step's becomes the best.

        With `cotrain` there may be none, since no target was within `cotrain.max_quality_kl`.
        """
        folder = self._folder / DRAFTER
        if folder.is_dir() or (self._recipe.cotrain is not None and not progress.best_tau):
            return progress
        self._console.say(f"{folder} is gone; the best drafter from step {progress.step} on is kept")
        return replace(progress, best_tau=0.0, best_step=progress.step, evaluated=False)

    def _require_fixed(self, progress: Progress, subject: str) -> None:
        """Raise ConfigError for a checkpoint whose weights were trained with other fixed tensors than those here."""
        stored, recipe = progress.fixed or {}, self._recipe
        name = next((name for name, value in self._fixed.items() if stored.get(name, value) != value), None)
        if name is None:
            return
        if "vocabulary" in name:
            what, origin = "draft vocabulary", "the texts of data.prompts with their responses"
        else:
            what, origin = name, f"target.model={recipe.target.model} and the section drafter"
        if recipe.start_from is not None:
            origin = f"start_from={recipe.start_from}"
        raise ConfigError(
            f"{subject} a checkpoint of step {progress.step} with another {what} than the one that {origin} gives now; "
            "expected what the run began with, or a new run"
        )

    def log(self, row: dict[str, Any]) -> None:
        """Write a row to the metrics and to the tracker."""
        if self._main:
            with self._writing(METRICS):
                append_metrics(self._folder, row)
        if self._tracker is not None:
            self._tracker.log(row)

    def offer(self, step: int, result: dict[str, Any]) -> None:
        """Save the drafter if it is the best by this evaluation."""
        with self._writing(DRAFTER):
            self.best.offer(step, result)

    def checkpoint(self, step: int, last: Last, evaluated: bool, end: int | None) -> None:
        """Save a checkpoint, unless the newest one is of this step. `end`: see `Progress`."""
        if step == self._saved:
            return
        state = self._engine.state()
        if self._main:
            best = self.best
            progress = Progress(step, best.tau, best.step, last.alpha, last.quality_kl, evaluated, end, self._fixed)
            recipe, keep = stored_values(self._recipe), self._recipe.train.keep_checkpoints
            with self._writing(METRICS):
                flush_metrics(self._folder)
            with self._writing(CHECKPOINTS):
                save_state(self._folder / CHECKPOINTS, progress, recipe, state, keep)
        self.meet()
        self._saved = step

    def finish(self, steps: int, peak: int, estimate: "MemoryEstimate | None", data: TrainingData) -> None:
        """Write the run's summary, and print, of several sources, the statistics of each.

        `peak`: the most bytes that this start of the run has used.
        """
        if self._main:
            memory = {"peak_bytes": peak, "estimated_bytes": None if estimate is None else estimate.announced}
            best = self.best
            summary: dict[str, Any] = {"best_step": best.step, "best_tau": best.tau, "steps": steps}
            metrics = read_metrics(self._folder)
            evaluations = [row for row in metrics if "evaluation" in row]
            if evaluations and max(len(data.counts), len(set(data.heldout_sources))) > 1:
                # A run that continues another one may have the best evaluation of that one.
                row = next((row for row in evaluations if row["step"] == best.step), evaluations[-1])
                summary["by_source"] = by_source(data, row)
                self._console.show(table_by_source(summary["by_source"], row["step"]))
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
