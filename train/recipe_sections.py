"""The sections of a recipe except the drafter's: every key with its type, its default and its meaning."""

import os
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from draftsmith.config import LARGEST_SEED, Count, Number, Section, no_as_written, no_truth_value
from draftsmith.distill.data_section import Prompts, TeacherServerSection
from draftsmith.distill.losses import LOSSES
from draftsmith.train.optimizers import OPTIMIZERS, SCHEDULES

if TYPE_CHECKING:
    from typing import TypeAlias

    Term: TypeAlias = str
    OptimizerName: TypeAlias = str
    ScheduleName: TypeAlias = str
else:  # the keys of the tables
    Term, OptimizerName, ScheduleName = Literal[*LOSSES], Literal[*OPTIMIZERS], Literal[*SCHEDULES]

DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
"""Environment variable by which accelerate says that it was launched with DeepSpeed."""


def default_optimizer() -> str:
    """Return `train.optimizer` where a recipe names none: 'adamw' under DeepSpeed, which has no Muon; else 'muon'."""
    return "adamw" if os.environ.get(DEEPSPEED, "false").lower() == "true" else "muon"


class TeacherSection(Section):
    kind: Literal["online", "cached", "files", "server"] = "online"
    """'online' runs the target in every step. 'cached' runs it over the data once and stores its hidden states on disk,
    which pays off from the second epoch. 'files' reads hidden states that an engine wrote into the folder `file`.
    'server' requests them from a running engine, and loads no layer of the target."""
    server: TeacherServerSection | None = None
    """The engine, for 'server'."""
    file: str | None = None
    """For 'files': a folder of vLLM's or speculators' states of the rows of data.prompts (distill/state_files.py)."""
    dtype: Literal["float32", "bfloat16", "float8"] = "bfloat16"
    """Dtype of the cached states."""
    shard_rows: Count = 256
    """Rows in each file of the cache."""


Weight = Annotated[Number, Field(ge=0)]


class ObjectiveSection(Section):
    kind: Term = "kl"
    """KL(p || q), KL(q || p), Jensen-Shannon, total variation, -log alpha, cross-entropy with the target's argmax or
    with the sequence's next token (label), LK-lambda, or the expected accepted length; see distill/losses.py."""
    mix: dict[Term, Weight] = Field(default_factory=dict)
    """Weights of several terms, instead of `kind`."""
    temperature: Annotated[Number, Field(gt=0)] = 1.0
    """Temperature of both p and q in the objective. For greedy decoding use 'ce'."""
    position_decay: Annotated[Number, Field(gt=0, le=1)] = 0.8
    """Draft position k has the weight position_decay ** k."""
    chunk_tokens: Count = 1024
    """Tokens whose logits are in memory at a time."""
    feature_weight: Weight = 0.0
    """Weight of the SmoothL1 distance between the drafter's state and the target's; for eagle and hass."""
    top_k: Count = 10
    """Number of most likely tokens in the term that `top_k_weight` adds."""
    top_k_weight: Weight = 0.0
    """Weight of the cross-entropy over the target's `top_k` most likely tokens (HASS)."""
    confidence_weight: Weight = 1.0
    """Weight of the confidence head's cross-entropy, where the drafter has one."""


class TrainSection(Section):
    steps: Count = 200
    """Optimizer steps."""
    batch_size: Count = 16
    """Sequences in an optimizer step, over all processes and accumulation steps."""
    gradient_accumulation: Count = 1
    """Forward and backward passes that each process's share of a batch is split into."""
    sequence_parallel: Annotated[Count, Field(le=16)] = 1
    """Processes that share each sequence in training: each computes the drafter's states at a part of its positions."""
    activation_checkpointing: bool = False
    """Recompute activations inside the drafter's blocks in the backward pass instead of storing them."""
    compile: bool = False
    """Compile the drafter's blocks with torch.compile; pays off in long runs on a GPU."""
    learning_rate: Annotated[Number, Field(gt=0)] | None = None
    """Peak rate after the warm-up. The default depends on the drafter's type, the optimizer and the target's hidden
    size; see heads/configs.py."""
    schedule: ScheduleName = "cosine"
    """The rate after the warm-up: 'cosine' to a tenth, 'linear' to zero, 'constant', or 'wsd', which is constant until
    the last `decay_fraction` of the steps."""
    decay_fraction: Annotated[Number, Field(gt=0, le=1)] = 0.2
    """Share of the steps in which 'wsd' decays the rate to zero."""
    warmup_fraction: Annotated[Number, Field(ge=0, lt=1)] = 0.05
    """Share of the steps in which the rate rises linearly."""
    optimizer: OptimizerName = Field(default_factory=default_optimizer)
    """'muon' optimizes the matrices inside the drafter's layers with Muon, the rest with AdamW, and needs fewer steps.
    The default is 'muon', and 'adamw' under DeepSpeed, which supports no other."""
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    """Decoupled weight decay of the drafter's optimizers."""
    clip_norm: Annotated[Number, Field(gt=0)] = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
    mixed_precision: Annotated[Literal["auto", "no", "bf16"], BeforeValidator(no_as_written)] = "auto"
    """Precision of forward passes and of Muon's matrix products; 'auto' is bf16 where the hardware supports it."""
    draft_length: Count | None = None
    """gamma, draft tokens in a round of the periodic evaluation, and the checkpoint's default; by default the number of
    the drafter's heads, or 4."""
    target_tau: Annotated[Number, Field(gt=1)] | None = None
    """Stop when the lower end of the measured tau's 95 % interval has reached this."""
    patience: Count | None = None
    """Stop when tau over this many evaluations is not significantly higher than over the same number before them; with
    the schedule 'wsd', begin the decay and stop after it."""
    evaluate_every: Count = 50
    """Steps between two evaluations on held-out prompts."""
    checkpoint_every: Count = 50
    """Steps between two checkpoints."""
    keep_checkpoints: Count = 2
    """Checkpoints to keep; older ones are deleted."""
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED), BeforeValidator(no_truth_value)] = 0
    """Seed of the initial weights, the order of the data and sampling."""

    def rate(self, step: int, end: int | None = None) -> float:
        """Return the rate of `step`, counted from 0: a linear warm-up to the peak, then the schedule.

        Args:
            end: the step after which 'wsd' ends, by default the last one.
        """
        peak, warmup = self.learning_rate, self.warmup_steps
        assert peak is not None, "`with_rate` has set it where the recipe has none"
        if step < warmup:
            return peak * (step + 1) / warmup
        done = (step - warmup) / max(1, self.steps - warmup)
        decayed = max(0.0, 1 - ((end or self.steps) - step) / self.decay_steps)
        return peak * SCHEDULES[self.schedule].share(done, decayed)

    @property
    def warmup_steps(self) -> int:
        """The number of steps in which the rate rises."""
        return max(1, round(self.steps * self.warmup_fraction))

    @property
    def decay_steps(self) -> int:
        """The number of steps at the end of 'wsd' in which the rate falls."""
        return max(1, round(self.steps * self.decay_fraction))


class CotrainSection(Section):
    lora_rank: Count = 32
    """Rank of the adapters on the target."""
    modules: list[str] | None = None
    """Last component of the names of the layers to adapt; by default every linear layer in the blocks, or with fused
    experts those of the attention."""
    learning_rate_ratio: Annotated[Number, Field(gt=0)] = 0.25
    """Learning rate of the adapters relative to train.learning_rate."""
    warmup_fraction: Annotated[Number, Field(ge=0, lt=1)] = 0.3
    """Share of the steps in which only the drafter is trained."""
    drafter_weight: Annotated[Number, Field(gt=0)] = 0.2
    """Weight of the drafter's loss for the adapters, relative to that of the KL from the original target; reached over
    a fifth of the steps."""
    max_quality_kl: Annotated[Number, Field(gt=0)] = 0.05
    """Bound on that KL in nats per token; a drafter is not saved while the KL on held-out text exceeds it."""


class EvaluationSection(Section):
    prompts: Prompts | None = None
    """'embedded', a JSONL file, 'self' (with another seed than training's), or a list of sources with shares of
    `evaluation.count`; by default the embedded held-out text, or the last prompts of the training data."""
    count: Count = 8
    """Prompts to decode; those taken from a training file are kept out of training."""
    prompt_tokens: Count = 48
    """Length of embedded prompts."""
    max_new_tokens: Annotated[Count, Field(ge=2)] = 48
    """Tokens decoded for each prompt; the first one is the target's, without a draft."""
    temperature: Annotated[Number, Field(ge=0)] = 0.0
    """Sampling temperature; 0 is greedy."""
