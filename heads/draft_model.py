"""An independent draft model: a small causal LM with the target's vocabulary.

    committed tokens ──▶ [small LM, own KV cache] ──▶ d1 ──▶ d2 ──▶ … ──▶ d_gamma

It reads only tokens, so any transformers causal LM with the same tokenizer serves, trained here or not.
Leviathan et al. 2023, arXiv:2211.17192.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from draftsmith.errors import ConfigError
from draftsmith.heads.drafter import Context, TeacherSignals, TrainableDrafter, Tree, Unrolled


class DraftModel(TrainableDrafter):
    """Wraps a transformers causal LM, `model`, with a cache of its own."""

    type: ClassVar[str] = "draft_model"

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.vocab_size = model.config.get_text_config(decoder=True).vocab_size
        self.context_limit = getattr(model.config, "max_position_embeddings", None)

    @classmethod
    def from_target(
        cls,
        target: nn.Module,
        *,
        num_hidden_layers: int = 1,
        hidden_size: int | None = None,
        intermediate_size: int | None = None,
        num_attention_heads: int | None = None,
        init: Literal["random", "target_layers"] = "random",
    ) -> Self:
        """A small model of the target's own architecture.

        `init="target_layers"` starts from the target's embeddings, norms, lm_head and evenly spaced layers, the first
        and last among them; the widths must then stay the target's.
        """
        config = deepcopy(target.config)
        depth = config.num_hidden_layers
        if not 1 <= num_hidden_layers <= depth:
            raise ConfigError.of("drafter.num_hidden_layers", num_hidden_layers, f"1 to the target's {depth}")
        _resize(config, num_hidden_layers, hidden_size, intermediate_size, num_attention_heads)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        if init == "target_layers":
            if (hidden_size, intermediate_size, num_attention_heads) != (None, None, None):
                raise ConfigError("drafter.init='target_layers' keeps the target's widths; expected no other width")
            copy_layers(target, model, spread(num_hidden_layers, depth))
        return cls(model)

    def config(self) -> dict[str, Any]:
        return self.model.config.to_diff_dict()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        options = {key: value for key, value in config.items() if key != "model_type"}
        return cls(AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **options)))

    def start(self, context: Context) -> None:
        super().start(context)
        self._reader = context.reader(self.model)
        self._reader.append([self._known(text.tokens[:-1]) for text in context.texts])

    def begin(self, rows: list[int]) -> Tensor:
        # What it has not read yet: the last committed token, and after a round of full acceptance one more.
        unread: list[list[int]] = [[] for _ in self.context.texts]
        for row in rows:
            unread[row] = self._known(self.context.texts[row].tokens[self._reader.lengths[row] :])
        return self._reader.append(unread)

    def _known(self, tokens: list[int]) -> list[int]:
        """`tokens` as this model can read them: a target with a larger padded vocabulary may have ids beyond it."""
        if self.shared_vocabulary is None:
            return tokens
        return [token if token < self.vocab_size else 0 for token in tokens]

    def extend(self, trees: Sequence[Tree], nodes: list[list[int]]) -> list[Tensor]:
        return self._reader.branch(trees, nodes)

    def observe(self, paths: list[list[int]]) -> None:
        self._reader.commit(paths)

    def drop(self, rows: list[int]) -> None:
        self._reader.drop(rows)

    def unroll(self, signals: TeacherSignals) -> list[Unrolled]:
        output = self.model.base_model(
            input_ids=signals.input_ids_BT, attention_mask=signals.attention_mask_BT, use_cache=False
        )
        return [Unrolled(output.last_hidden_state, self.model.get_output_embeddings(), offset=0)]


def _resize(
    config: PreTrainedConfig, layers: int, hidden: int | None, intermediate: int | None, heads: int | None
) -> None:
    """Change `config` in place to the given sizes; None keeps the target's."""
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    if intermediate is not None:
        config.intermediate_size = intermediate
    if hidden is None and heads is None:
        return
    config.hidden_size = hidden or config.hidden_size
    config.num_attention_heads = heads or config.num_attention_heads
    if config.hidden_size % config.num_attention_heads:
        raise ConfigError.of(
            "drafter.hidden_size", config.hidden_size, f"a multiple of {config.num_attention_heads} heads"
        )
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = config.num_attention_heads
    if hasattr(config, "head_dim"):
        config.head_dim = config.hidden_size // config.num_attention_heads


def spread(count: int, depth: int) -> list[int]:
    """`count` of `depth` layers, evenly spaced, the first and last among them; only the first when count is 1."""
    if count == 1:
        return [0]
    return [round(i * (depth - 1) / (count - 1)) for i in range(count)]


def layers_name(model: nn.Module) -> str:
    depth = model.config.num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return name
    raise ConfigError(
        f"model {type(model).__name__} has no list of {depth} layers to copy from; expected init='random'"
    )


@torch.no_grad()
def copy_layers(target: nn.Module, model: nn.Module, layers: list[int]) -> None:
    """Copy the target's weights into `model`, whose layer i becomes the target's layer `layers[i]`."""
    prefix = layers_name(target) + "."
    weights = {}
    for name, value in target.state_dict().items():
        if not name.startswith(prefix):
            weights[name] = value
            continue
        index, rest = name.removeprefix(prefix).split(".", 1)
        for new, old in enumerate(layers):
            if int(index) == old:
                weights[f"{prefix}{new}.{rest}"] = value
    model.load_state_dict(weights)
