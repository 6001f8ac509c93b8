"""The training loop: teacher signals, unrolled drafter, agreement, one optimizer step; through accelerate."""

import itertools
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from draftsmith.decode.clock import PartClock
from draftsmith.distill.cotraining import measure_quality
from draftsmith.distill.data_section import PLACES
from draftsmith.distill.teacher import Batch
from draftsmith.errors import EngineLost
from draftsmith.heads.model_config import context_limit, start_token
from draftsmith.train.checkpoints import fixed_tensors
from draftsmith.train.engine import reduced
from draftsmith.train.first_batch import start_drafter, start_once
from draftsmith.train.launch import RunContext, make_accelerator, make_engine, preflight, unused_settings
from draftsmith.train.models import described, load_parts, target_width, with_rate, with_section
from draftsmith.train.non_finite import failure
from draftsmith.train.process import Stopping, launch_variables, leave
from draftsmith.train.progress import PARTS, Console, MemoryMeter, in_units
from draftsmith.train.recipe import Recipe
from draftsmith.train.recorder import BestDrafter, Record
from draftsmith.train.run_folder import (
    DRAFTER,
    check_continuation,
    check_output,
    claimed_output,
    eval_command,
    is_finished,
    read_metrics,
)
from draftsmith.train.step import (
    Last,
    StepSums,
    batch_indices,
    collate,
    compile_drafter,
    make_step,
    response_tokens,
    sequence_part,
)
from draftsmith.train.training_data import read_images
from draftsmith.train.validation import (
    early_end,
    estimate_acceptance,
    evaluate_drafter,
    tau_by_source,
    validate,
    validation_rows,
)

if TYPE_CHECKING:
    from draftsmith.distill.server.states import ServedStates


def train(recipe: Recipe) -> Path:
    """Train the recipe's drafter and return the folder of the best one, by measured tau.

    Runs in one process or, under `accelerate launch`, in several. A run that was interrupted continues from its last
    checkpoint; a finished one is left as it is. On SIGTERM or Ctrl-C it finishes the step, writes a checkpoint and
    exits as the signal would have: SystemExit(143), or KeyboardInterrupt. A second signal ends it at once.

    Raises:
        ConfigError: before any work starts, for a recipe that cannot run here or an output folder of another run.
        DraftsmithError: for a loss that is not finite, or a folder that cannot be written, see train/recorder.py.
    """
    recipe = with_section(with_rate(recipe))
    first_process = launch_variables().rank == 0  # there is no accelerator yet
    folder = Path(recipe.output)
    check_output(recipe)
    check_continuation(recipe)
    preflight(recipe, training=True)
    if is_finished(recipe):
        if first_process:
            console = Console(True)
            console.say(f"{recipe.name}: already finished in {folder}")
            if (folder / DRAFTER).is_dir():
                console.suggest(eval_command(recipe))
            else:
                console.say(f"there is no {folder / DRAFTER}")
        return folder / DRAFTER
    accelerator = make_accelerator(recipe, folder)
    accelerator.wait_for_everyone()  # every process has checked the folder before the first one writes
    with claimed_output(recipe, accelerator):
        _run(recipe, accelerator, folder)
    return folder / DRAFTER


def _run(recipe: Recipe, accelerator: Accelerator, folder: Path) -> None:
    """Train in all processes together."""
    run = TrainingRun(recipe, accelerator, folder)
    with run.stopping:
        try:
            run.train()
        except (KeyboardInterrupt, SystemExit):
            run.console.say(f"{recipe.name}: stopped at once; the same command continues from the last checkpoint")
            raise
        finally:
            run.record.close()
            if run.served is not None:
                run.served.close()
        accelerator.wait_for_everyone()  # launchers end all processes when the first one exits
    accelerator.trackers = []
    if accelerator.num_processes > 1:
        # Without a pause 5 of 25 runs of two gloo processes hung while their objects were freed, with it none of 25;
        # probably gloo's threads still wait for Python's lock at that time.
        time.sleep(0.2)
    accelerator.end_training()
    if run.stopping.agreed is not None:
        leave(run.stopping.agreed)


class TrainingRun:
    """A run's models, data and progress; `train` is the loop."""

    def __init__(self, recipe: Recipe, accelerator: Accelerator, folder: Path) -> None:
        from draftsmith.heads.formats.writers import unserved
        from draftsmith.train.estimate.memory import announce_memory

        self.recipe, self.accelerator, self.folder = recipe, accelerator, folder
        self.context = context = RunContext.of(recipe, accelerator)
        self.console = context.console
        self.estimate = announce_memory(context)
        self.memory = MemoryMeter(accelerator.device)  # after the estimate, whose own memory does not count
        for line in (described(recipe, target_width(recipe)), *unused_settings(recipe.train)):
            self.console.say(line)
        if recipe.start_from is None and (note := unserved(recipe.drafter)) is not None:
            self.console.say(f"drafter: {note}")
        self.target, self.drafter, self.data, self.teacher = load_parts(context)
        self.draft_length = recipe.draft_length(self.drafter.max_draft_length)
        model = self.target.model
        self.excluded = frozenset(recipe.data.exclude_rows)
        self.expect = getattr(self.teacher, "expect", None)  # of teachers that read ahead
        self.served: ServedStates | None = getattr(self.teacher, "states", None)
        self.ahead = 1 if self.served is None else self.served.settings.ahead
        self.start_token = start_token(model) if model.config.is_encoder_decoder else None
        self.limit = context_limit(model.config)
        self.read_images = read_images(recipe.data, self.target)
        start = partial(start_drafter, recipe, self.drafter, self.teacher, self.data, self.batch)
        sizes = start() if self.served is None else start_once(accelerator, self.drafter, start)
        if self.served is not None:  # after the start, whose regression reads the state of each last token
            found = self.served.found_answers() if accelerator.is_main_process else {}
            (self.served.answers,) = broadcast_object_list([found])
        self.clock = PartClock(accelerator.device, PARTS)
        part = sequence_part(recipe.train.sequence_parallel, accelerator)
        step, optimizers, self.adapters = make_step(
            recipe, model, self.drafter, self.teacher, sizes=sizes, part=part, clock=self.clock
        )
        if recipe.train.compile:
            compile_drafter(self.drafter)
        fixed = fixed_tensors(self.drafter)  # whole here, before an engine shards them
        self.engine = make_engine(recipe, accelerator, step, optimizers)
        best = BestDrafter(recipe, self.target, self.drafter, self.draft_length, self.adapters, self._served_by())
        self.stopping = Stopping()
        self.record = Record(context, best, self.engine, self.stopping, fixed)
        progress = self.record.progress
        self.begin, self.evaluated = (0, False) if progress is None else (progress.step, progress.evaluated)
        self.last = Last() if progress is None else progress.last
        self.end = (progress and progress.end) or recipe.train.steps

    def _served_by(self) -> str | None:
        """Return the command of the engine that computes the target's states, without addresses; None without one."""
        recipe, server = self.recipe, self.recipe.teacher.server
        if self.served is None or server is None:
            return None
        from draftsmith.distill.server.transport import engine_command

        return engine_command(server.model_copy(update=PLACES), recipe.target, recipe.data, self.served.served)

    def train(self) -> None:
        """Take the remaining steps, with evaluations and checkpoints, and write the run's summary."""
        name, settings, step, stopping = self.recipe.name, self.recipe.train, self.begin, self.stopping
        self.engine.module.train()
        with self.console.bar(name, settings.steps, step) as advance:
            if not self.evaluated:
                self._evaluate(step)
            while step < self.end and stopping.agreed is None:
                try:
                    row = self.step(step)
                except EngineLost:
                    self._checkpoint(step)
                    raise
                step += 1
                self.record.log({"step": step, **row})
                advance(row)
                self.evaluated = step % settings.evaluate_every != 0 and step != self.end
                if not self.evaluated and stopping.agreed is None:
                    self._evaluate(step)
                if step % settings.checkpoint_every == 0 or step == self.end or stopping.agreed is not None:
                    self._checkpoint(step)
        if stopping.agreed is not None:
            self.console.say(f"{name}: stopped by a signal after step {step}; the same command continues from there")
            return
        if self.served is not None:
            self.served.delete_left()
        self.record.finish(step, self.memory.peak(), self.estimate, self.data)
        best = self.record.best
        peak = in_units(self.memory.peak())
        estimates = {} if self.estimate is None else self.estimate.totals
        estimated = ", ".join(f"{in_units(size)} estimated {phase}" for phase, size in estimates.items())
        measured = f"best {'' if self.served is None else 'estimated '}tau {best.tau:.2f} at step {best.step}"
        self.console.say(f"{name}: {measured}; peak memory {peak}{estimated and f' ({estimated})'}")
        self.console.suggest(eval_command(self.recipe))

    def step(self, step: int) -> dict[str, Any]:
        """Take an optimizer step over a global batch, and return its metrics."""
        started = time.perf_counter()
        self.clock.start()
        settings, accelerator = self.recipe.train, self.accelerator
        # Block drafters draw the positions that they are trained at; processes that share texts draw the same.
        torch.manual_seed(settings.seed * 1_000_003 + step * 1_009 + self.context.text_share[1])
        indices = self._indices(step)
        if self.expect is not None:
            later = [self._indices(at) for at in range(step, min(step + self.ahead + 1, self.end))]
            self.expect([rows for global_batch in later for rows in self._own(global_batch)])
        tokens = response_tokens(self.data.rows, indices) if self.served is None else self._served_tokens(indices)
        rate = settings.rate(step, self.end)
        for optimizer in self.engine.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("ratio", 1.0)
        sums = self._accumulate(indices, tokens, step / settings.steps)
        flags = sums.loss.new_tensor(self.stopping.flags())
        alpha_K, match_K, count_K = (
            reduced(accelerator, value) for value in (sums.alpha_K, sums.match_K, sums.count_K)
        )
        scalars = torch.stack([sums.loss, sums.quality_kl.to(sums.loss)])
        loss_sum, quality, *signals = reduced(accelerator, torch.cat([scalars, flags])).tolist()
        self.stopping.agree(signals)
        loss = loss_sum / tokens
        self.clock.end("other")
        norm = self.engine.step() if math.isfinite(loss) else math.nan
        self.clock.end("optimizer")
        if not math.isfinite(norm):
            values = {"step": step + 1, "loss": str(loss), "gradient_norm": str(norm)}
            self._stop_at(step, indices, values)
        self.clock.end("other")
        self.last = Last((alpha_K / count_K.clamp_min(1)).tolist(), quality / tokens)  # after the device's last part
        seconds = time.perf_counter() - started
        return {
            "loss": loss,
            "alpha": self.last.alpha,
            "top1": (match_K / count_K.clamp_min(1)).tolist(),
            "lr": rate,
            **({} if self.adapters is None else {"quality_kl": self.last.quality_kl}),
            "gradient_norm": norm,
            "tokens_per_second": tokens / seconds,
            "seconds": seconds,
            "seconds_by_part": self.clock.seconds(),
            "memory_bytes": self.memory.trimmed(),
        }

    def _stop_at(self, step: int, indices: Sequence[int], values: dict[str, str | int]) -> NoReturn:
        """Save the state after `step`, and raise the error of a batch that gave `values` which are not finite."""
        if self.engine.finite():
            self._checkpoint(step)
        raise failure(self.context, self.target, self.teacher, self.data, indices, values, self.batch)

    def _accumulate(self, indices: list[int], tokens: int, done: float) -> StepSums:
        """Run forward and backward pass over this process's part of the batch, and return its sums."""
        accelerator, parts = self.accelerator, self.recipe.train.gradient_accumulation
        totals: StepSums | None = None
        for part, rows in enumerate(self._own(indices)):
            batch = self.batch(rows)
            self.clock.end("fetch")
            with self.engine.part(last=part == parts - 1):
                sums: StepSums = self.engine.module(batch, done, self.last)
                # Engines average gradients over processes; this gives the gradient of the mean over all tokens.
                self.engine.backward(sums.loss * accelerator.num_processes / tokens)
            self.clock.end("backward")
            totals = StepSums(*(value.detach() for value in sums)).plus(totals)
        assert totals is not None, "gradient_accumulation is at least 1"
        return totals

    def _served_tokens(self, indices: list[int]) -> int:
        """Wait for the engine's states of a global batch, and return its trained tokens without those of lost rows.

        Raises:
            EngineLost: on all processes, where one of them has no states.
        """
        assert self.served is not None
        own, kept, problem = [row for rows in self._own(indices) for row in rows], list[int](), None
        try:
            lost = self.served.missing(own)
            kept = [row for row in own if row not in lost]
        except EngineLost as error:
            problem = error
        counts = torch.tensor([response_tokens(self.data.rows, kept), int(problem is not None)])
        tokens, problems = reduced(self.accelerator, counts.to(self.accelerator.device)).tolist()
        if problems:
            raise problem or EngineLost("another process has no states from the engine")
        return max(1, tokens)

    def _indices(self, step: int) -> list[int]:
        """Return the rows of the global batch of `step`."""
        settings = self.recipe.train
        return batch_indices(settings.seed, step, settings.batch_size, self.data.trained, self.excluded)

    def _own(self, indices: list[int]) -> list[list[int]]:
        """Return this process's rows of a global batch, by accumulation step."""
        shares, share = self.context.text_share
        size = len(indices) // (shares * self.recipe.train.gradient_accumulation)
        return [indices[begin : begin + size] for begin in range(share * size, len(indices), shares * size)]

    def batch(self, indices: list[int]) -> Batch:
        """Return these rows as a batch on this process's device."""
        device, images = self.accelerator.device, self.read_images
        batch = collate(self.data.rows, indices, device, self.start_token, images, limit=self.limit)
        lost = [] if self.served is None else self.served.missing(indices)
        batch.mask_BT[[place for place, row in enumerate(indices) if row in lost]] = False
        return batch

    def _evaluate(self, step: int) -> None:
        """Decode held-out prompts on the main process or its group, and keep the drafter if its tau is the best so far.

        A signal interrupts the evaluation; the resumed run then begins with it.
        """
        self.console.doing("evaluating")
        placement, module = self.context.placement, self.engine.module
        validation = validate(
            self.context,
            module,
            self.data,
            step,
            self.last,
            batch=self.batch,
            stopping=self.stopping,
            meet=self.record.meet,
            expect=self.expect,
        )
        if self.stopping.agreed is not None:
            return
        if validation is not None and not math.isfinite(validation["loss"]):
            values = {"step": step, "validation_loss": str(validation["loss"])}
            self._stop_at(step, validation_rows(self.data, self.recipe.data.exclude_rows), values)
        with self.engine.gathered():
            if placement.share.index == 0:
                result = self._measure(step, validation)
                if result is not None:
                    validated = {} if validation is None else {"validation": validation}
                    self.record.log({"step": step, **validated, "evaluation": result})
                    self.evaluated = True
            placement.meet()
        self.console.doing("")
        self.record.meet()
        self._end_early(step)

    def _end_early(self, step: int) -> None:
        """Set the run's last step where its evaluations so far say that it can end before the recipe's."""
        settings, found = self.recipe.train, None
        if settings.target_tau is None and settings.patience is None:
            return
        if self.accelerator.is_main_process and self.evaluated:
            decaying = self.end != settings.steps
            found = early_end(settings, read_metrics(self.folder), step, decaying)
        found = broadcast_object_list([found])[0]
        if found is not None:
            self.end, reason = found
            self.record.log({"step": step, "ending": {"reason": reason, "last_step": self.end}})
            self.console.say(f"  {reason}; the run ends after step {self.end}")

    def _measure(self, step: int, validation: dict[str, Any] | None) -> dict[str, Any] | None:
        """Decode held-out prompts with the present weights, offer the drafter, and return its metrics.

        `validation`: of the validation pass, printed with the metrics.

        Returns None where a signal came.
        """
        prompts = itertools.count(1)

        def stop() -> bool:
            self.console.doing(f"evaluating prompt {next(prompts)} of {len(self.data.heldout)}")
            return self.stopping.received is not None

        drafter, settings, length = self.drafter, self.recipe.evaluation, self.draft_length
        if self.served is not None:
            try:
                result = estimate_acceptance(self.teacher, drafter, self.data, settings, length, self.batch)
            except EngineLost as error:
                self.stopping.problem = str(error)
                return None
        else:
            how = {"stop": stop, "read_images": self.read_images}
            result = evaluate_drafter(self.target.model, drafter, self.data.heldout, settings, length, **how)
        if result is None or not self.accelerator.is_main_process:
            return result
        if self.adapters is not None:
            heldout = [prompt.input_ids for prompt in self.data.heldout]
            result["target_quality"] = measure_quality(self.target.model, heldout)
        if len(set(self.data.heldout_sources)) > 1:
            result["tau_by_source"] = tau_by_source(result, self.data.heldout_sources)
        self.console.evaluation(step, result, validation)
        self.record.offer(step, result)
        return result

    def _checkpoint(self, step: int) -> None:
        end = None if self.end == self.recipe.train.steps else self.end
        self.record.checkpoint(step, self.last, self.evaluated, end)
