"""An independent draft model: a small causal LM with the target's vocabulary.

    committed tokens ──▶ [small LM, own KV cache] ──▶ d1 ──▶ d2 ──▶ … ──▶ d_gamma

It reads only tokens, so any transformers causal LM with the same tokenizer serves, trained here or not.
Leviathan et al. 2023, arXiv:2211.17192.
"""

from copy import deepcopy
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from draftsmith.errors import ConfigError
from draftsmith.heads.draft import Draft
from draftsmith.heads.drafter import Context, Drafter, Needs, TeacherSignals, Unrolled


class DraftModel(Drafter):
    """Wraps a transformers causal LM, `model`, with a cache of its own."""

    type: ClassVar[str] = "draft_model"
    needs: ClassVar[Needs] = Needs()
    max_draft_length = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.vocab_size = model.config.vocab_size
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
        self._cache = context.new_cache(self.model)
        self._forward(context, context.tokens)

    def propose(self, context: Context, draft_length: int) -> Draft:
        # What it has not read yet: the last committed token, and after a round of full acceptance one more.
        unread = context.tokens[self._cache.length :]
        tokens, rows = [], []
        for _ in range(draft_length):
            token, q_V = context.choose(self._forward(context, unread))
            tokens.append(token)
            rows.append(q_V)
            unread = [token]
        return Draft.chain(tokens, None if rows[0] is None else torch.stack(rows))

    def observe(self, committed_length: int) -> None:
        self._cache.rollback(committed_length)

    def _forward(self, context: Context, tokens: list[int]) -> Tensor:
        """Logits [V] behind the last of `tokens`."""
        start, device = self._cache.length, self.model.device
        output = self.model(
            input_ids=torch.tensor([tokens], device=device),
            attention_mask=context.mask(start, len(tokens)),
            position_ids=torch.arange(start, start + len(tokens), device=device)[None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[0, -1]

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


def _layers_name(model: nn.Module) -> str:
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
    prefix = _layers_name(target) + "."
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
