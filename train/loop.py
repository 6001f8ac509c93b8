"""The training loop: teacher signals, unrolled drafter, agreement, one optimizer step; through accelerate."""

import math
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from draftsmith.distill.cotraining import Adapters, adapted_fingerprint, measure_quality
from draftsmith.distill.objectives import Objective
from draftsmith.distill.targets import LoadedTarget, load_target
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.heads.checkpoint import describe_target, save_drafter
from draftsmith.provenance import environment, model_fingerprint
from draftsmith.storage import atomic_folder, write_json
from draftsmith.train.batches import batch_indices, collate, response_tokens
from draftsmith.train.checkpoint import Progress, load_state, save_state, trained
from draftsmith.train.console import Console
from draftsmith.train.data import check_sources, resample
from draftsmith.train.drafters import data_and_drafter
from draftsmith.train.evaluate import evaluate_drafter
from draftsmith.train.launching import precision, require_divisible
from draftsmith.train.optimizers import optimizers
from draftsmith.train.output import (
    CHECKPOINTS,
    DRAFTER,
    FAILED,
    FINISHED,
    TARGET,
    Metrics,
    check_output,
    claim_output,
    finish,
)
from draftsmith.train.recipe import Recipe
from draftsmith.train.step import AgreementStep, CotrainSettings, CotrainStep
from draftsmith.train.teachers import make_teacher
from draftsmith.train.trackers import TRACKER_FOLDER, require_tracker, start_tracker, tracker_row


def train(recipe: Recipe) -> Path:
    """Train the recipe's drafter and return the folder of the best one, by measured tau.

    Runs in one process or, under `accelerate launch`, in several. A run that was interrupted goes on from its last
    checkpoint; a finished one is left as it is.

    Raises:
        ConfigError: before any work starts, for a recipe that cannot run here or an output folder of another run.
    """
    check_output(recipe)
    require_tracker(recipe.tracker)
    check_sources(recipe)
    if recipe.cotrain is not None and recipe.teacher.kind == "cached":
        raise ConfigError("teacher.kind='cached' with cotrain; expected 'online': the target changes")
    folder = Path(recipe.output)
    if (folder / FINISHED).exists():
        Console(True).say(f"{recipe.name}: already finished in {folder}")
        return folder / DRAFTER
    accelerator = Accelerator(
        mixed_precision=precision(recipe),
        log_with=None if recipe.tracker == "none" else recipe.tracker,
        project_dir=str(folder / TRACKER_FOLDER),
    )
    require_divisible(recipe, accelerator.num_processes)
    accelerator.wait_for_everyone()  # every process has looked at the folder before the first one writes
    if accelerator.is_main_process:
        claim_output(recipe)
    run = _Run(recipe, accelerator, folder)
    run.train()
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return folder / DRAFTER


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up to the peak, then a cosine to a tenth of it. `step` counts from 0."""
    settings = recipe.train
    warmup = max(1, round(settings.steps * settings.warmup_fraction))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, settings.steps - warmup)
    return settings.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


class _Run:
    """One run's models, data and progress; `train` is the loop."""

    def __init__(self, recipe: Recipe, accelerator: Accelerator, folder: Path) -> None:
        self.recipe, self.accelerator, self.folder = recipe, accelerator, folder
        self.console = Console(accelerator.is_main_process)
        settings = recipe.target
        with accelerator.main_process_first():  # the embedded target is built once, the Hub is asked once
            self.target: LoadedTarget = load_target(
                settings.model,
                revision=settings.revision,
                dtype=settings.dtype,
                trust_remote_code=settings.trust_remote_code,
                device=accelerator.device,
                progress=accelerator.is_main_process,
            )
        self.draft_length, self.data, self.drafter = data_and_drafter(recipe, self.target, accelerator, self.console)
        self.round = 0
        self.teacher = make_teacher(recipe, self.target.model, self.drafter, self.data.rows, accelerator, self.console)
        objective = Objective(**recipe.objective_options(self.draft_length))
        self.step_module, made = self._step_and_optimizers(objective)
        self.module, *self.optimizers = accelerator.prepare(self.step_module, *made)
        config = self.target.model.config
        self.start_token = config.decoder_start_token_id if config.is_encoder_decoder else None
        self.described = describe_target(
            self.target.model, self.target.tokenizer, self.target.name, self.target.revision
        )

    def _step_and_optimizers(self, objective: Objective) -> tuple[AgreementStep, list[torch.optim.Optimizer]]:
        """The module that is trained, with adapters on the target where the recipe wants them."""
        settings, together = self.recipe.train, self.recipe.cotrain
        self.adapters: Adapters | None = None
        if together is None:
            step = AgreementStep(self.drafter, objective, self.teacher)
            return step, optimizers(self.drafter, settings.optimizer, settings.weight_decay)
        torch.manual_seed(settings.seed)
        sizes = {"rank": together.lora_rank, "alpha": together.lora_alpha, "modules": together.modules}
        self.base_fingerprint = model_fingerprint(self.target.model)
        self.adapters = Adapters.on(self.target.model, **sizes)
        rest = {field.name: getattr(together, field.name) for field in fields(CotrainSettings)}
        step = CotrainStep(self.drafter, objective, self.teacher, self.adapters, CotrainSettings(**rest))
        ratio = together.learning_rate_ratio
        return step, optimizers(self.drafter, settings.optimizer, settings.weight_decay, step.adapters, ratio)

    def train(self) -> None:
        progress, problems = load_state(self.folder / CHECKPOINTS, self.step_module, self._plain_optimizers())
        self.last_alpha = None if progress is None else progress.alpha
        for problem in problems:
            self.console.say(problem)
        step, self.best_tau, self.best_step = (
            (progress.step, progress.best_tau, progress.best_step) if progress else (0, 0.0, 0)
        )
        if progress is not None:
            self.console.say(f"{self.recipe.name}: resuming behind step {step}")
        if self.accelerator.is_main_process:
            self.metrics = Metrics(self.folder, step if progress else None)
        start_tracker(self.accelerator, self.recipe)
        settings = self.recipe.train
        self.module.train()
        if progress is None:
            self._evaluate(0)
        with self.console.bar(self.recipe.name, settings.steps, step) as advance:
            while step < settings.steps:
                self._refresh(step)
                row = self._step(step)
                step += 1
                self._log({"step": step, **row})
                advance(row)
                if step % settings.evaluate_every == 0 or step == settings.steps:
                    self._evaluate(step)
                if step % settings.checkpoint_every == 0 or step == settings.steps:
                    self._checkpoint(step)
        if self.accelerator.is_main_process:
            finish(
                self.folder,
                {"best_step": self.best_step, "best_tau": self.best_tau, "environment": environment()},
            )
        self.console.say(f"{self.recipe.name}: best tau {self.best_tau:.2f} at step {self.best_step}")

    def _step(self, step: int) -> dict[str, Any]:
        """One optimizer step over one global batch; its metrics."""
        started = time.perf_counter()
        settings, accelerator = self.recipe.train, self.accelerator
        torch.manual_seed(settings.seed * 1_000_003 + step * 1_009 + accelerator.process_index)
        every = self.recipe.data.refresh_every or settings.steps
        in_round = step - self.round * every
        indices = batch_indices(settings.seed + self.round, in_round, settings.batch_size, len(self.data.rows))
        tokens = response_tokens(self.data.rows, indices)
        rate = learning_rate(self.recipe, step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("ratio", 1.0)
        sums = self._accumulate(indices, tokens, step / settings.steps)
        norm = accelerator.clip_grad_norm_(self.module.parameters(), settings.clip_norm)
        loss_sum, alpha_K, match_K, count_K, quality = (accelerator.reduce(value, "sum") for value in sums)
        loss = loss_sum.item() / tokens
        if not math.isfinite(loss) or not math.isfinite(float(norm)):
            self._stop_at(step, indices, loss, float(norm))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.perf_counter() - started
        self.last_alpha = (alpha_K / count_K.clamp_min(1)).tolist()
        return {
            "loss": loss,
            "alpha": self.last_alpha,
            "top1": (match_K / count_K.clamp_min(1)).tolist(),
            "lr": rate,
            **({} if self.adapters is None else {"quality_kl": quality.item() / tokens}),
            "gradient_norm": float(norm),
            "tokens_per_second": tokens / seconds,
            "seconds": seconds,
        }

    def _refresh(self, step: int) -> None:
        """Where a new round begins: have all prompts answered anew, with the drafter as it is."""
        number = step // (self.recipe.data.refresh_every or self.recipe.train.steps)
        if number == self.round:
            return
        self.round, started = number, time.perf_counter()
        self.data, sampled = resample(
            self.recipe, self.target, self.drafter, self.data, number, self.accelerator, self.console
        )
        seconds = time.perf_counter() - started
        if sampled and self.accelerator.is_main_process:
            rate = sampled["tokens"] / seconds
            self.metrics.write({"step": step, "sampling": {"round": number, **sampled, "tokens_per_second": rate}})
            self.console.say(f"  round {number}: sampled {rate:.0f} tokens/s with tau {sampled['tau']:.2f}")

    def _stop_at(self, step: int, indices: list[int], loss: float, norm: float) -> None:
        """Keep the state before the step, and what it was fed, for whoever looks for the reason; then stop."""
        if all(bool(parameter.isfinite().all()) for parameter in trained(self.step_module).values()):
            self._checkpoint(step)
        file = self.folder / FAILED
        if self.accelerator.is_main_process:
            rows = [{"row": index, **self.data.rows[index]} for index in indices]
            told = {"step": step + 1, "round": self.round, "loss": str(loss), "gradient_norm": str(norm)}
            write_json(file, {**told, "rows": rows})
        raise DraftsmithError(
            f"loss={loss} with gradient norm {norm} at step {step + 1} (rows {indices}); expected finite numbers. "
            f"The batch is in {file}, the state before it in {self.folder / CHECKPOINTS}; try a lower "
            "train.learning_rate"
        )

    def _accumulate(self, indices: list[int], tokens: int, done: float) -> list[torch.Tensor]:
        """Forward and backward over this process's part of the batch; the sums that the step returns."""
        accelerator, parts = self.accelerator, self.recipe.train.gradient_accumulation
        size = len(indices) // (accelerator.num_processes * parts)
        totals: list[torch.Tensor] = []
        for part in range(parts):
            begin = (part * accelerator.num_processes + accelerator.process_index) * size
            batch = collate(self.data.rows, indices[begin : begin + size], accelerator.device, self.start_token)
            last = part == parts - 1
            with torch.enable_grad() if last else accelerator.no_sync(self.module):
                values = self.module(batch, done, self.last_alpha)
                # Engines average gradients over processes; the sum over all tokens is wanted.
                accelerator.backward(values[0] * accelerator.num_processes / tokens)
            detached = [value.detach() for value in values]
            totals = detached if not totals else [a + b for a, b in zip(totals, detached, strict=True)]
        return totals

    def _evaluate(self, step: int) -> None:
        """Decode held-out prompts on the main process; keep the drafter when its tau is the best so far."""
        if self.accelerator.is_main_process:
            result = evaluate_drafter(
                self.target.model, self.drafter, self.data.heldout, self.recipe.evaluation, self.draft_length
            )
            fits = True
            if self.adapters is not None:
                result["target_quality"] = measure_quality(self.target.model, self.data.heldout)
                fits = result["target_quality"]["kl"] <= self.recipe.cotrain.max_quality_kl
            self._log({"step": step, "evaluation": result})
            self.console.evaluation(step, result)
            if result["tau"] > self.best_tau and fits:
                self.quality = result.get("target_quality")
                self.best_tau, self.best_step = result["tau"], step
                self._save_best()
        self.accelerator.wait_for_everyone()

    def _save_best(self) -> None:
        if self.adapters is not None:
            fingerprint = adapted_fingerprint(self.base_fingerprint, self.adapters.tensors())
            name = f"{self.target.name} with the adapter {self.recipe.name}"
            self.described |= {"name": name, "model_fingerprint": fingerprint, "quality": self.quality}
            with atomic_folder(self.folder / TARGET) as temporary:
                self.adapters.save(temporary, self.target.name, self.quality)
                self.target.tokenizer.save_pretrained(temporary)
        with atomic_folder(self.folder / DRAFTER) as temporary:
            save_drafter(
                self.drafter,
                temporary,
                target=self.described,
                recipe=self.recipe.model_dump(mode="json"),
                draft_length=self.draft_length,
                tokenizer=self.target.tokenizer,
            )

    def _checkpoint(self, step: int) -> None:
        if self.accelerator.is_main_process:
            progress = Progress(step, self.best_tau, self.best_step, self.last_alpha)
            keep = self.recipe.train.keep_checkpoints
            save_state(self.folder / CHECKPOINTS, progress, self.step_module, self._plain_optimizers(), keep)
        self.accelerator.wait_for_everyone()

    def _plain_optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer.optimizer for optimizer in self.optimizers]

    def _log(self, row: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            self.metrics.write(row)
        if self.recipe.tracker != "none":
            self.accelerator.log(tracker_row(row), step=row["step"])
