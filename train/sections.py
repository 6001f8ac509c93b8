"""The sections of a recipe, but for the drafter's: every key with what it means."""

import os
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from draftsmith.decode.chance import LARGEST_SEED
from draftsmith.train.section import Count, Number, Section, no_as_written, no_truth_value

MONTH = 30 * 24 * 60
"""In minutes."""
DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
"""The variable by which accelerate says that it was launched with DeepSpeed."""


def default_optimizer() -> Literal["adamw", "muon"]:
    return "adamw" if os.environ.get(DEEPSPEED, "false").lower() == "true" else "muon"


class TargetSection(Section):
    model: str = "embedded"
    """'embedded', a local folder, or a Hub id."""
    revision: str | None = None
    """A branch, tag or commit of the Hub repository."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the frozen target; the drafter is always trained in float32."""
    trust_remote_code: bool = False
    """Run code that the target's repository carries."""
    offload: bool = False
    """Keep its layers in the host's memory, and move each to the accelerator while it computes."""
    sharded: bool = False
    """Keep a share of its layers on each process, where there are several; by default each has all of it."""


class DataSection(Section):
    prompts: str = "embedded"
    """'embedded'; a file (JSONL, JSON, Parquet, text) or a folder of them; or a Hub data set. Rows have `messages`,
    `conversations` (ShareGPT), `turns`, `prompt`, `question`, `instruction` or `text`."""
    subset: str | None = None
    """Configuration of a Hub data set."""
    split: str = "train"
    """Of a Hub data set."""
    count: Count = 1000
    """At most this many prompts, or samples of a file with answers."""
    prompt_tokens: Count = 48
    """Embedded prompts have this length; longer prompts of a file are left out and counted."""
    response: Literal["target", "text"] = "target"
    """'target' samples an answer to each prompt; 'text' takes those that stand in the file, which is another
    distribution than the drafter will meet."""
    response_tokens: Count = 128
    """The longest response, or with several turns all that stands behind the first prompt; longer ones of a file are
    left out and counted."""
    turns: Literal["first", "all"] = "first"
    """Which turns of a conversation the target answers; with 'all', it goes on behind its own answers."""
    responses: Count = 1
    """That the target gives to each prompt, each sampled with a seed of its own: a few hundred prompts are enough with
    several."""
    temperature: Annotated[Number, Field(ge=0)] = 1.0
    """At which the target answers."""
    batch_size: Count = 64
    """Prompts that are answered together."""
    drafter_share: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """Share of the prompts that the drafter answers by itself, as it is then; for draft models."""
    refresh_every: Count | None = None
    """Steps after which all prompts are answered anew, with the drafter as it is then."""
    speculate: bool = True
    """Let the drafter make that faster; where verifying a whole batch costs as much as decoding it, false is faster."""
    chat_template: str | None = None
    """A file with a chat template, instead of the tokenizer's."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """What the chat template is given beside the messages, such as enable_thinking."""
    deduplicate: bool = True
    """Leave out samples that stood in the file before."""
    pack: bool = False
    """Put several samples into one row of data.pack_tokens, each seeing itself alone, so that little is padding."""
    pack_tokens: Count | None = None
    """Length of packed rows; by default data.prompt_tokens + data.response_tokens."""


class TeacherSection(Section):
    kind: Literal["online", "cached", "logprobs"] = "online"
    """'cached' runs the target over the data once and keeps its states on disk; worth it for more than one epoch.
    'logprobs' reads answers and the likeliest tokens at each place from `file`, for draft models alone."""
    file: str | None = None
    """Of 'logprobs': JSON lines as OpenAI's API and vLLM write them, see distill/logprobs.py. They take the place of
    data.prompts."""
    dtype: Literal["float32", "bfloat16", "float8"] = "bfloat16"
    """Of the cached states."""
    shard_rows: Count = 256
    """Rows of a file of the cache."""


Term = Literal["kl", "reverse_kl", "js", "tv", "lk_alpha", "ce", "label", "lk_lambda", "accepted_length"]
Weight = Annotated[Number, Field(ge=0)]
Temperature = Annotated[Number, Field(gt=0)]


class ObjectiveSection(Section):
    kind: Term = "kl"
    """KL(p || q), KL(q || p), Jensen-Shannon, total variation, -log alpha, cross-entropy with the target's argmax or
    with the text's own next token (label), LK-lambda, or the expected accepted length; see distill/objectives.py."""
    mix: dict[Term, Weight] = Field(default_factory=dict)
    """Weights of several of them, instead of `kind`."""
    temperature: Temperature | Annotated[list[Temperature], Field(min_length=1)] = 1.0
    """Of both p and q inside the objective; several are averaged. For temperature 0 take 'ce'."""
    position_decay: Annotated[Number, Field(gt=0, le=1)] = 0.8
    """Draft position k weighs position_decay ** k."""
    position_weights: list[Weight] = Field(default_factory=list)
    """Weight of each draft position, instead of position_decay; the last one holds for all further ones."""
    beta: Annotated[Number, Field(gt=0, lt=1)] = 0.5
    """The target's share in the mixture of 'js'."""
    eta: Weight = 3.0
    """Of 'lk_lambda': how fast total variation takes over from KL as alpha rises; its authors use 10 for Medusa."""
    dpace: Annotated[Number, Field(ge=0, le=1)] | None = None
    """Weigh each position by how much of the draft hangs on it (D-PACE), smoothed by this; its authors use 0.5."""
    chunk_tokens: Count = 1024
    """Tokens whose logits are alive at a time."""
    feature_weight: Weight = 0.0
    """Of the SmoothL1 distance between the drafter's state and the target's, for eagle and hass."""
    top_k: Count = 10
    """Of the target's likeliest tokens, in the term that `top_k_weight` adds."""
    top_k_weight: Weight = 0.0
    """Of the cross-entropy over the target's `top_k` likeliest tokens (HASS)."""
    confidence_weight: Weight = 1.0
    """Of the cross-entropy of a confidence head, where the drafter has one."""


class TrainSection(Section):
    steps: Count = 200
    """Optimizer steps."""
    batch_size: Count = 16
    """Sequences a step, over all processes and accumulation steps together."""
    gradient_accumulation: Count = 1
    """Parts that each process's share of a batch is cut into."""
    activation_checkpointing: bool = False
    """Compute what lies inside the drafter's blocks again in the backward pass instead of keeping it."""
    compile: bool = False
    """Let torch.compile make kernels of the drafter's layers; worth it for long runs on a GPU."""
    learning_rate: Annotated[Number, Field(gt=0)] | None = None
    """Peak, after the warm-up; a cosine leads to a tenth of it. By default what the family of drafters learns with, by
    optimizer and width of the target; see train/rates.py."""
    warmup_fraction: Annotated[Number, Field(ge=0, lt=1)] = 0.05
    """Share of the steps in which the rate rises."""
    optimizer: Literal["adamw", "muon"] = Field(default_factory=default_optimizer)
    """'muon' for the matrices inside the drafter's layers, AdamW for the rest: learns much faster in few steps. The
    default, but for DeepSpeed, which has 'adamw' alone."""
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    """The optimizers'."""
    clip_norm: Annotated[Number, Field(gt=0)] = 1.0
    """Largest norm of the gradient."""
    mixed_precision: Annotated[Literal["auto", "no", "bf16"], BeforeValidator(no_as_written)] = "auto"
    """Of forward passes and Muon's products; 'auto' takes bf16 where the machine computes it in hardware."""
    draft_length: Count | None = None
    """gamma: draft tokens a round, in the periodic evaluation and as the checkpoint's default; by default as many as
    the drafter has heads, or 4."""
    evaluate_every: Count = 50
    """Steps between two evaluations, which decode held-out prompts."""
    checkpoint_every: Count = 50
    """Steps between two checkpoints to resume from."""
    keep_checkpoints: Count = 2
    """Older ones are deleted."""
    timeout_minutes: Annotated[Number, Field(gt=0, le=MONTH)] = 24 * 60
    """How long a process waits for the others, which may sample, download or evaluate, before the run is given up; of
    several processes only."""
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED), BeforeValidator(no_truth_value)] = 0
    """Of initial weights, order of the data and sampling."""


class CotrainSection(Section):
    lora_rank: Count = 32
    """Of the adapters on the target."""
    lora_alpha: Annotated[Number, Field(gt=0)] = 16
    """Scale of the adapters: alpha / rank."""
    modules: list[str] | None = None
    """Last parts of the names of the layers that get adapters; by default every linear layer in the blocks."""
    learning_rate_ratio: Annotated[Number, Field(gt=0)] = 0.25
    """The adapters' rate, relative to train.learning_rate."""
    warmup_fraction: Annotated[Number, Field(ge=0, lt=1)] = 0.3
    """Share of the steps in which the drafter is trained alone."""
    ramp_fraction: Annotated[Number, Field(ge=0, le=1)] = 0.2
    """Share of the steps, behind the warm-up, over which the drafter's loss comes to bear on the adapters."""
    drafter_weight: Annotated[Number, Field(gt=0)] = 0.2
    """Of the drafter's loss for the adapters."""
    quality_weight: Annotated[Number, Field(gt=0)] = 1.0
    """Of the KL from the original target."""
    max_quality_kl: Annotated[Number, Field(gt=0)] = 0.05
    """Bound on that KL, in nats a token: on held-out text beyond it no drafter is kept."""


class PublishSection(Section):
    repo: str
    """On the Hub: user/name; made when the run starts, where there is none."""
    when: Literal["end", "best"] = "end"
    """'best' also pushes each new best drafter while the run goes on."""
    revision: str | None = None
    """The branch that is pushed to; by default main."""
    private: bool = False
    """Of a repository that is made."""
    licence: str | None = None
    """The Hub's identifier of one, such as apache-2.0."""
    base_model: str | None = None
    """The target on the Hub, where target.model names it otherwise."""


class EvaluationSection(Section):
    prompts: str | None = None
    """'embedded' or a JSONL file; by default the embedded held-out text, or the last prompts of the training file."""
    count: Count = 8
    """Prompts that are decoded; those taken from a training file are kept out of training."""
    prompt_tokens: Count = 48
    """Length of embedded prompts."""
    max_new_tokens: Count = 48
    """Tokens decoded for each."""
    temperature: Annotated[Number, Field(ge=0)] = 0.0
    """At which they are decoded; 0 is greedy."""
