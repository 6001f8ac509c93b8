"""The recipe's `drafter` section, one for each type; its keys are what `from_target` of the drafter takes."""

from typing import Annotated, Any, Literal

from pydantic import Field

from draftsmith.config import Count, Depth, Number, Section, Whole


class DraftModelSection(Section):
    type: Literal["draft_model"]
    model: str | None = None
    """Start from this checkpoint, a folder or a Hub id, such as a smaller member of the target's family."""
    config: dict[str, Any] | None = None
    """Start from scratch with any transformers config, `model_type` among its keys; the vocabulary is the target's."""
    num_hidden_layers: Depth = 1
    """Layers of the draft model."""
    hidden_size: Count | None = None
    """Width; by default the target's."""
    intermediate_size: Count | None = None
    """Width of the MLP; by default the target's."""
    num_attention_heads: Count | None = None
    """Attention heads; by default the target's."""
    init: Literal["random", "target_layers"] = "random"
    """'target_layers' prunes the target: its embeddings, lm_head, last norm and the layers that `keep` names."""
    keep: Literal["even", "first", "last"] | list[Whole] = "even"
    """The target's layers that are kept: evenly spaced, the first, the last, or these (from 0)."""
    lora_rank: Count | None = None
    """Train LoRA adapters of this rank alone; they are merged when the draft model is saved."""
    lora_alpha: Annotated[Number, Field(gt=0)] = 16
    """Scale of the adapters: alpha / rank."""


class VocabularyOption(Section):
    draft_vocab_size: Count | None = None
    """Only so many tokens in the drafter's lm_head, the most frequent of the responses; by default all."""


class MedusaSection(VocabularyOption):
    type: Literal["medusa"]
    num_heads: Depth = 3
    """Heads, i.e. the longest draft."""
    num_layers: Depth = 1
    """Residual blocks a head."""
    shared_lm_head: bool = False
    """One lm_head for all heads instead of one each."""


class HydraSection(VocabularyOption):
    type: Literal["hydra"]
    num_heads: Depth = 4
    """Heads, i.e. the longest draft."""
    num_layers: Depth = 1
    """Layers a head: the first reads state and tokens, the others are residual blocks."""
    shared_lm_head: bool = False
    """One lm_head for all heads instead of one each."""


class MlpSpeculatorSection(VocabularyOption):
    type: Literal["mlp_speculator"]
    num_heads: Depth = 3
    """Steps, i.e. the longest draft."""
    inner_size: Count | None = None
    """Width of the speculator's state; by default the target's."""
    tie_weights: bool = True
    """One step and one lm_head for all positions."""


class EagleSection(Section):
    type: Literal["eagle"]
    num_hidden_layers: Depth = 1
    """Decoder layers."""
    train_steps: Depth = 1
    """Steps that are trained; more than one makes it HASS."""
    noise: Annotated[Number, Field(ge=0)] = 0.1
    """Uniform noise on the target's states while training."""


class HassSection(Section):
    type: Literal["hass"]
    num_hidden_layers: Depth = 1
    """Decoder layers."""
    train_steps: Depth = 3
    """Steps that are trained, each on the last one's states."""
    noise: Annotated[Number, Field(ge=0)] = 0.1
    """Uniform noise on the target's states while training."""


class Eagle3Section(VocabularyOption):
    type: Literal["eagle3"]
    num_hidden_layers: Depth = 1
    """Decoder layers; the first reads embedding and state side by side."""
    intermediate_size: Count | None = None
    """Width of the MLP; by default the target's."""
    layers: Annotated[list[Whole], Field(min_length=1)] | None = None
    """The target's layers that are read, counted from 1; by default 2, L/2 and L - 3."""
    train_steps: Depth = 7
    """Steps of the training-time test."""
    norm_before_residual: bool = False
    """The residual is the normed state."""
    norm_before_fc: bool = False
    """One norm over all features before fc."""
    fc_norm: bool = False
    """A norm for each feature before fc (EAGLE-3.1)."""
    norm_output: bool = False
    """What is fed back is normed (EAGLE-3.1)."""


class MtpSection(Section):
    type: Literal["mtp"]
    init: Literal["random", "native"] = "random"
    """'native' starts from the module that the target's own checkpoint brings."""
    num_hidden_layers: Depth = 1
    """Decoder layers."""
    train_steps: Depth = 3
    """Steps that are trained, each on the last one's states."""


class ParallelEagleSection(VocabularyOption):
    type: Literal["peagle"]
    num_tokens: Depth = 5
    """Draft tokens of the one pass."""
    num_hidden_layers: Depth = 1
    """Decoder layers."""
    layers: Annotated[list[Whole], Field(min_length=1)] | None = None
    """The target's layers that are read, counted from 1; by default 2, L/2 and L - 3."""
    mask_token: Whole | None = None
    """A token that texts hardly hold; by default the last."""


class DFlashSection(Section):
    type: Literal["dflash"]
    block_size: Depth = 8
    """The anchor and the draft tokens of one pass."""
    num_hidden_layers: Depth = 2
    """Layers."""
    layers: Annotated[list[Whole], Field(min_length=1)] | None = None
    """The target's layers that are read, counted from 1; by default five, evenly spaced."""
    anchors: Count = 64
    """Random positions of each text behind which a block is trained."""
    mask_token: Whole | None = None
    """Whose embedding the masks start from; by default the last token's."""
    markov_rank: Annotated[Whole, Field(ge=0)] = 0
    """DSpark: rank of the bias that the token before gives; 0 for none."""
    confidence_head: bool = False
    """DSpark: also learn how likely each token is accepted, for the policy `confidence`."""


AnyDrafterSection = Annotated[
    DraftModelSection
    | MedusaSection
    | HydraSection
    | MlpSpeculatorSection
    | EagleSection
    | HassSection
    | Eagle3Section
    | MtpSection
    | ParallelEagleSection
    | DFlashSection,
    Field(discriminator="type"),
]

DRAFTERS: dict[str, type[Section]] = {
    "draft_model": DraftModelSection,
    "medusa": MedusaSection,
    "hydra": HydraSection,
    "mlp_speculator": MlpSpeculatorSection,
    "eagle": EagleSection,
    "hass": HassSection,
    "eagle3": Eagle3Section,
    "mtp": MtpSection,
    "peagle": ParallelEagleSection,
    "dflash": DFlashSection,
}
