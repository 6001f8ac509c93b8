"""Recipe section and entry of every drafter.

Adding a drafter takes its own file in this package and its section and entry here. The entries give the recipe's
`drafter` section, `HEADS`, the model card's noun and the default learning rates.
"""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, SerializeAsAny, WrapValidator

from draftsmith.config import Count, Depth, Location, Number, Section, Whole
from draftsmith.errors import ConfigError
from draftsmith.reading import parse_specification, specified_name

Start = Literal["untrained", "target", "trained"]
"""Weights of a new drafter: untrained, copied from the target, or trained before."""


class DrafterSection(Section):
    """The recipe's `drafter` section; its other keys are the keyword arguments of the drafter's `from_target`."""

    type: Any
    """A key of `DRAFTERS`; each section declares it as a `Literal`."""

    @property
    def start(self) -> Start:
        """The origin of its weights when training begins."""
        return "untrained"


class DraftModelSection(DrafterSection):
    type: Literal["draft_model"]
    model: Location | None = None
    """Checkpoint to start from, a folder or a Hub id, such as a smaller model of the target's family."""
    config: dict[str, Any] | None = None
    """Build random weights from a transformers config with `model_type`; the vocabulary is the target's."""
    num_hidden_layers: Depth = 1
    """Number of layers."""
    intermediate_size: Count | None = None
    """Width of the MLP; by default the target's."""
    init: Literal["random", "target_layers"] = "random"
    """'target_layers' copies the target's embeddings, lm_head, last norm and the layers that `keep` names."""
    keep: Literal["even", "first", "last"] | list[Whole] = "even"
    """Layers of the target to copy: evenly spaced, the first, the last, or a list, counted from 0."""
    lora_rank: Count | None = None
    """Train only LoRA adapters of this rank; they are merged when the draft model is saved."""

    @property
    def start(self) -> Start:
        if self.model is not None:
            return "trained"
        return "target" if self.init == "target_layers" else "untrained"


class VocabularyOption(DrafterSection):
    """The option of drafters whose lm_head may have fewer rows than the target's."""

    draft_vocab_size: Count | None = None
    """Size of the draft vocabulary, the most frequent tokens of the responses; by default the whole vocabulary."""


class WindowOption(VocabularyOption):
    """The option of networks whose layers can attend to the last tokens alone."""

    window: Count | None = None
    """Tokens that a layer attends to; by default all. Its memory and time then stop growing with the context."""


class MedusaSection(VocabularyOption):
    type: Literal["medusa"]
    num_heads: Depth = 3
    """Number of heads, which is the maximum draft length."""
    num_layers: Depth = 1
    """Residual blocks per head."""
    shared_lm_head: bool = False
    """Use one lm_head for all heads instead of one per head."""


class EagleSection(VocabularyOption):
    type: Literal["eagle"]
    num_hidden_layers: Depth = 1
    """Number of decoder layers."""
    train_steps: Depth = 1
    """Number of trained steps; with more than one the method is HASS."""
    noise: Annotated[Number, Field(ge=0)] = 0.1
    """Maximum of the uniform noise on the target's states in training."""


class HassSection(EagleSection):
    type: Literal["hass"]  # pyright: ignore[reportIncompatibleVariableOverride]
    train_steps: Depth = 3
    """Number of trained steps, each on the states of the last."""


class Eagle3Section(WindowOption):
    type: Literal["eagle3"]
    num_hidden_layers: Depth = 1
    """Number of decoder layers; the first reads the concatenation of embedding and state."""
    intermediate_size: Count | None = None
    """Width of the MLP; by default the target's."""
    layers: Annotated[list[Whole], Field(min_length=1)] | None = None
    """Layers of the target to read, counted from 1; by default 2, L/2 and L - 3."""
    train_steps: Depth = 7
    """Number of steps of the training-time test."""
    norm_before_residual: bool = False
    """Use the normed state as the residual."""
    norm_before_fc: bool = False
    """Add one norm over all features before fc."""
    fc_norm: bool = False
    """Add a norm for each feature before fc (EAGLE-3.1)."""
    norm_output: bool = False
    """Normalise the states that are fed back (EAGLE-3.1)."""
    qk_norm: bool = False
    """Normalise queries and keys of each head (Qwen3), as DeepSpec does."""


class MtpSection(VocabularyOption):
    type: Literal["mtp"]
    init: Literal["random", "native"] = "random"
    """'native' starts from the MTP modules in the target's checkpoint."""
    num_modules: Depth | None = None
    """Number of modules, each of which drafts one token; a single one is shared by all draft steps. By default 1; with
    `init: native` as many as the target's config states (`num_nextn_predict_layers`)."""
    num_hidden_layers: Depth = 1
    """Number of decoder layers."""
    train_steps: Depth = 3
    """Number of trained steps of a single module, each on the states of the last; of several, each is one step."""

    @property
    def start(self) -> Start:
        return "trained" if self.init == "native" else "untrained"


class ParallelEagleSection(WindowOption):
    type: Literal["peagle"]
    num_tokens: Depth = 5
    """Draft tokens per pass, which is the maximum draft length."""
    num_hidden_layers: Depth = 1
    """Number of decoder layers."""
    layers: Annotated[list[Whole], Field(min_length=1)] | None = None
    """Layers of the target to read, counted from 1; by default 2, L/2 and L - 3."""
    mask_token: Whole | None = None
    """A token that is rare in texts; by default the last."""
    mask_before_fc: bool = False
    """The trained state of masks is an input of `fc`, as in drafters of the speculators package, not its output."""


class DFlashSection(WindowOption):
    type: Literal["dflash"]
    block_size: Depth = 8
    """Block size: the anchor and the masks of one pass."""
    sample_from_anchor: bool = False
    """The anchor's position predicts too, each position its successor: as many draft tokens as the block is long."""
    num_hidden_layers: Depth = 2
    """Number of layers."""
    layers: Annotated[list[Whole], Field(min_length=1)] | None = None
    """Layers of the target to read, counted from 1; by default five, evenly spaced."""
    anchors: Count = 64
    """Blocks trained per text, at random positions."""
    mask_token: Whole | None = None
    """The token whose embedding masks have; by default the last one with an embedding."""
    trained_mask: bool = False
    """Train an embedding for masks. GGUF files and the layouts of z-lab and DeepSpec have none beside the target's."""
    markov_rank: Annotated[Whole, Field(ge=0)] = 0
    """DSpark: rank of the bias by the token before; 0 for none."""
    markov_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    """DSpark: 'gated' multiplies the token's embedding by gates that read the block's state; 'rnn' carries a state over
    the tokens of the draft."""
    confidence_head: bool = False
    """DSpark: learn the probability that each token is accepted, for the policy `confidence`."""
    conv_kernel_size: Annotated[Whole, Field(ge=0)] = 0
    """DFlash 2: positions of the block that convolutions around attention and MLP read, as published 2; 0 for none."""
    conv_group_size: Count = 16
    """DFlash 2: channels that share the part of a convolution's kernel that depends on the state."""
    selector_rank: Annotated[Whole, Field(ge=0)] = 0
    """DFlash 2: rank of the scores of candidates by the token before and the state, as published 256; 0 for none."""
    selector_top_k: Count = 16
    """DFlash 2: number of candidates, the most likely tokens of each position; only they are drafted."""
    lilicorr_candidate_topk: Annotated[Whole, Field(ge=0, le=16)] = 0
    """LiLiCorr: number of candidates of each position, as published 8; 0 for none. Engines need a power of two."""
    lilicorr_hidden_size: Whole = 1024
    """LiLiCorr: width of the layers over all candidates of a block; 0 for the target's."""
    lilicorr_num_layers: Depth = 2
    """LiLiCorr: number of these layers."""
    lilicorr_num_heads: Count = 8
    """LiLiCorr: attention heads of these layers."""
    lilicorr_mlp_ratio: Annotated[Number, Field(gt=0)] = 2.0
    """LiLiCorr: width of their MLPs relative to theirs."""
    lilicorr_factor_dim: Count = 1024
    """LiLiCorr: size of the vectors whose products are the scores."""
    lilicorr_vector_eps: Annotated[Number, Field(gt=0)] = 1e-4
    """LiLiCorr: least norm by which these vectors are divided."""
    lilicorr_logit_scale: Annotated[Number, Field(gt=0)] = 8.0
    """LiLiCorr: factor of the scores."""


@dataclass(frozen=True)
class Rates:
    """Peak learning rates for a target of width 256, as measured by `benchmarks/rates.py`."""

    muon: float = 2e-2
    adamw: float = 3e-3
    scaled: bool = False
    """Whether Muon's rate is proportional to 1/width, as AdamW's is; otherwise it is constant up to width 256."""

    def at(self, width: int, optimizer: str) -> float | None:
        """Return the rate of an optimizer for a target of hidden size `width`; None for other optimizers.

        Rates are proportional to 1/width. Muon's are constant up to `WIDTH` for drafters whose matrices all start
        untrained: there, the best rate was the same from width 64 on. On SmolLM2 (width 576) 2e-2 lets EAGLE, HASS and
        DFlash diverge, and EAGLE-3 is better at 6e-3.
        """
        ratio = WIDTH / width
        shares = {"adamw": ratio, "muon": ratio if self.scaled else min(1.0, ratio)}
        return float(f"{getattr(self, optimizer) * shares[optimizer]:.1e}") if optimizer in shares else None


WIDTH = 256
TRAINED = Rates(muon=1.5e-3, adamw=2.5e-4, scaled=True)
"""For drafters of any type that start from their own trained weights."""


@dataclass(frozen=True)
class DrafterEntry:
    """Everything that other packages know of one type of drafter."""

    section: type[DrafterSection]
    implementation: str
    """`file.Class` in `heads/`, imported when it is first used."""
    card_name: str
    """Noun for the model card, as in "A … for speculative decoding"."""
    rates: Rates = Rates()
    """Default learning rates."""


DRAFTERS: dict[str, DrafterEntry] = {
    "draft_model": DrafterEntry(
        DraftModelSection,
        "draft_model.DraftModel",
        card_name="draft model",
        rates=Rates(muon=3e-3, adamw=2e-3, scaled=True),
    ),
    "medusa": DrafterEntry(
        MedusaSection,
        "medusa.Medusa",
        card_name="set of Medusa heads",
    ),
    "eagle": DrafterEntry(
        EagleSection,
        "eagle.Eagle",
        card_name="EAGLE-1 drafter",
        rates=Rates(muon=1e-2, scaled=True),
    ),
    "hass": DrafterEntry(
        HassSection,
        "eagle.Hass",
        card_name="HASS drafter",
        rates=Rates(muon=1e-2, scaled=True),
    ),
    "eagle3": DrafterEntry(
        Eagle3Section,
        "eagle3.Eagle3",
        card_name="EAGLE-3 drafter",
    ),
    "mtp": DrafterEntry(
        MtpSection,
        "mtp.Mtp",
        card_name="multi-token prediction module",
        rates=Rates(muon=1e-2, scaled=True),
    ),
    "peagle": DrafterEntry(
        ParallelEagleSection,
        "eagle3.ParallelEagle",
        card_name="P-EAGLE drafter",
    ),
    "dflash": DrafterEntry(
        DFlashSection,
        "dflash.DFlash",
        card_name="DFlash block drafter",
        rates=Rates(muon=1e-2, scaled=True),
    ),
}


class StoredSection(DrafterSection):
    """Options of a drafter whose type is in the files that `start_from` names; its own section checks their values."""

    model_config = ConfigDict(extra="allow")
    type: None = None


def _section(value: Any, of_type: Callable[[Any], DrafterSection]) -> DrafterSection:
    """Return the section of the type that is named, and one that holds the options where none is."""
    if isinstance(value, StoredSection) or not isinstance(value, dict) or value.get("type") is not None:
        return value if isinstance(value, StoredSection) else of_type(value)
    known = dict.fromkeys(key for entry in DRAFTERS.values() for key in entry.section.model_fields)
    for key in value.keys() - known:
        near = get_close_matches(str(key), known, 1, cutoff=0.5)
        hint = f"did you mean drafter.{near[0]}?" if near else "expected a key of a drafter's section"
        raise ConfigError(f"unknown key drafter.{key}={value[key]!r}; {hint}")
    return StoredSection(**value)


if TYPE_CHECKING:
    AnyDrafterSection = DrafterSection
else:
    _SECTIONS = (entry.section for entry in DRAFTERS.values())
    _TYPED = Annotated[reduce(or_, _SECTIONS), Field(discriminator="type")]
    AnyDrafterSection = Annotated[SerializeAsAny[_TYPED], WrapValidator(_section)]
    """The section of any drafter, chosen by `type`."""


_RETRIEVAL = {"draft_length": int, "min_match": int, "factor": float}
SETTINGS: dict[str, dict[str, type]] = {
    "prompt-lookup": {"max_ngram": int, **_RETRIEVAL},
    "suffix": _RETRIEVAL,
    "early-exit": {"layers": int},
    "native-mtp": {},
    "hybrid": {"drafter": str, "min_match": int},
}
"""Settings of each named drafter, with their types."""


def is_named(text: str) -> bool:
    """Return whether `text` names a drafter that needs no checkpoint, not a folder or a repository."""
    return specified_name(text) in SETTINGS


def require_weights(name: str, key: str = "drafter") -> None:
    """Raise ConfigError for the name of a drafter without weights; those of native-mtp are the target's."""
    if is_named(name) and name != "native-mtp" and not Path(name).is_dir():
        raise ConfigError(f"{key}={name} has no weights; expected a trained drafter, or native-mtp")


def parse_named(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and its settings; raise ConfigError for an unknown key or an invalid value."""
    name, values = parse_specification("drafter", text, SETTINGS)
    if name == "hybrid" and "drafter" not in values:
        raise ConfigError(
            f"drafter={text}; expected hybrid:drafter=FOLDER, the trained drafter for texts without a match"
        )
    return name, values
