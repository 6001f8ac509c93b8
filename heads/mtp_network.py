"""The network of multi-token prediction modules, and how several of them decode.

A network is a projection of the normed state and embedding, layers and a norm. Its layer is Llama's, or for targets'
own modules with latent attention or experts a layer of the target's own class in transformers, whose attention is
computed by the caller: in decoding with the cache, in training by the training-time test.

Of several modules, module k drafts token k from the states of module k - 1:

    module 0    f0,x1   f1,x2   f2,x3 ──▶ d1            f    final states of the target
    module 1            s1,x2   s2,x3   s3,d1 ──▶ d2    s, u states of modules 0 and 1
    module 2                    u2,x3   u3,d1   u4,d2 ──▶ d3

Each module has a cache of its own, whose first token is one later than in the module before. A draft ends with the last
module, as in transformers' `MtpModel` and SGLang's multi-layer worker, whose states these are. DeepSeek-AI 2024
(DeepSeek-V3), arXiv:2412.19437, section 2.2.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModel, LlamaConfig, PreTrainedConfig, PreTrainedModel

from draftsmith.heads.autoregressive import DraftNetwork
from draftsmith.heads.base import Level, Runner
from draftsmith.heads.layers import Attend, DecoderLayer, Rope, norm
from draftsmith.heads.rows import Columns, Counts, Rows, rows_of

# Shapes: B rows, Q tokens read, n nodes, K modules, H hidden size.

OPTIONS = ("qk_norm", "gated", "centred", "target_norm")
"""Boolean options of the network, which targets' own modules have."""
ATTEND = "draftsmith_mtp"
"""Name in transformers' `AttentionInterface`."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attend: Attend | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the output [B, T, h, d] of `attend`, which scales by 1 / sqrt(size of the queries) and has one size."""
    assert attend is not None, "`MtpNetwork.step` passes it"
    size, width = query.shape[-1], value.shape[-1]
    if scaling is not None:
        query = query * (scaling * size**0.5)
    if width < size:  # latent attention
        value = nn.functional.pad(value, (0, size - width))
    return attend(0, query, key, value)[..., :width].transpose(1, 2), None


AttentionInterface.register(ATTEND, _attend)


def target_layer(config: PreTrainedConfig) -> tuple[nn.Module, nn.Module]:
    """Return a new decoder layer and rotary embedding of the classes of the model that `config` describes."""
    with torch.device("meta"):
        decoder = AutoModel.from_config(config).get_decoder()
    config = copy(config)
    config._attn_implementation = ATTEND
    return type(decoder.layers[0])(config, 0), type(decoder.rotary_emb)(config)


class MtpNetwork(DraftNetwork):
    """A projection of the normed state and embedding, decoder layers and a norm.

    Args:
        config: of Llama's layers or, with another model type, of one layer of that model.
        centred: gains of norms are 1 + weight (Qwen3.5).
        target_norm: the norm after the layer is the target's last one, which is not trained (Ernie 4.5).
        layer: further options of Llama's layers, see `DecoderLayer`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        draft_vocab_size: int | None = None,
        *,
        centred: bool = False,
        target_norm: bool = False,
        **layer: bool,
    ) -> None:
        super().__init__(config, draft_vocab_size)
        self.token_layernorm, self.hidden_layernorm = norm(config, centred=centred), norm(config, centred=centred)
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        if config.model_type == "llama":
            layers: list[nn.Module] = [
                DecoderLayer(config, index, centred=centred, **layer) for index in range(config.num_hidden_layers)
            ]
        else:
            own, self.rotary = target_layer(config)
            layers = [own]
        self.layers = nn.ModuleList(layers)
        self.final_layernorm = norm(config, centred=centred).requires_grad_(not target_norm)

    @torch.no_grad()
    def start_from_target(self, target: PreTrainedModel, draft_vocabulary: list[int] | None) -> None:
        """At first input_proj passes the state through unchanged."""
        super().start_from_target(target, draft_vocabulary)
        hidden = self.config.hidden_size
        self.input_proj.weight[:, :hidden] += torch.eye(hidden)

    def step(
        self, embeds_BTH: Tensor, states_BTH: Tensor, rope: Rope, attend: Attend, read_Q: Tensor | None = None
    ) -> Tensor:
        both = torch.cat([self.hidden_layernorm(states_BTH), self.token_layernorm(embeds_BTH)], -1)
        x_BTH = self.input_proj(both)
        *before, last = self.layers
        if not isinstance(last, DecoderLayer):  # the only one
            x_BTH = last(x_BTH, attention_mask=None, position_embeddings=rope, attend=attend)
            return self.final_layernorm(x_BTH if read_Q is None else x_BTH.index_select(1, read_Q))
        for layer in before:
            x_BTH = layer(x_BTH, rope, attend)
        return self.final_layernorm(last(x_BTH, rope, attend, read_Q))


class ModuleRunner:
    """Runs the modules with one runner each, in place of the runner of one network; see `Runner`.

    `states` are those of all modules, side by side: [B, K * H] or [B, n, K * H].

    Args:
        runners: of networks that return states in place of logits.
        head: maps states to logits.
        blank_BH: states of sequences that are too short for a module. Its logits have no meaning there.
    """

    def __init__(self, runners: Sequence[Runner], head: Callable[[Tensor], Tensor], blank_BH: Tensor) -> None:
        self._runners, self._head = runners, head
        self._last = [blank_BH] * len(runners)
        """The state of each module after the last token that it has read of each row."""
        self.states = torch.cat(self._last, -1)

    @property
    def lengths(self) -> Sequence[int]:
        return self._runners[0].lengths

    def append(self, tokens: Sequence[list[int]], features_BQF: Tensor) -> Tensor:
        """Read committed tokens and return the logits [B, V] after the last one of each row."""
        rows = Rows.of(tokens, features_BQF.device)
        for k, runner in enumerate(self._runners):
            if not rows.width:
                break
            is_first = [int(length == 0) for length in runner.lengths]
            states_BQH = runner.append(rows, features_BQF, every=True)
            states_BQH = torch.cat([self._last[k][:, None], states_BQH], 1)
            self._last[k] = Columns(rows.counts).of(states_BQH)[:, 0]
            # The next module reads each token with the state at the token before, which the first one does not have.
            if any(is_first):
                rows = Rows([row[skip:] for row, skip in zip(rows, is_first, strict=True)], rows.device)
            features_BQF = Columns(Counts(is_first, rows.device), rows.width).of(states_BQH)
        self.states = torch.cat(self._last, -1)
        return self._head(self._last[0])

    def extend(self, level: Level, features_BnF: Tensor) -> Tensor:
        """Read the next level with its parents' states, and return the logits [B, n, V] after it."""
        states = list(features_BnF.chunk(len(self._runners), -1))
        states[level.depth :] = [
            runner.extend(level, before_BnH)
            for runner, before_BnH in zip(self._runners[level.depth :], states[level.depth - 1 :], strict=False)
        ]
        self.states = torch.cat(states, -1)
        return self._head(states[level.depth])

    def commit(self, slots: Sequence[list[int]]) -> None:
        """End the round: keep these draft slots of each row."""
        for runner in self._runners:
            runner.commit(slots)

    def drop(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        for runner in self._runners:
            runner.drop(rows)
        self._last = [rows_of(state_BH, rows) for state_BH in self._last]
