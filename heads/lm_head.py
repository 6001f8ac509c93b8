"""The map from final states to logits: the lm_head, the operations that a model applies after it, draft vocabularies.

Models scale logits (Granite, Cohere, Falcon-H1), cap them (Gemma 2) or add a bias (Marian), by config keys that differ
between families and that some classes ignore. Therefore the map is measured, once a model: in one forward pass a hook
replaces the output of the lm_head with known values, and the model's logits show what it does with them.

    lm_head(states) = z ──▶ cap * tanh(scale * z / cap) + bias = logits
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.model_config import has_data, require_in_memory
from draftsmith.provenance import fingerprint


def weight_of(module: nn.Module | None) -> Tensor:
    """Return the weight of a linear layer, an embedding or a norm."""
    weight = getattr(module, "weight", None)
    assert isinstance(weight, Tensor), f"{type(module).__name__} has no weight"
    return weight


# Shapes: n positions, T probed positions, H hidden size, V vocabulary.


@dataclass(frozen=True, eq=False)
class LogitsMap:
    """The operations of a model before and after its lm_head."""

    scale: float = 1.0
    cap: float | None = None
    """Limit of the soft cap cap * tanh(logits / cap) (Gemma 2, arXiv:2408.00118, section 2)."""
    bias_V: Tensor | None = None
    state_scale: float | None = 1.0
    """Input of the lm_head relative to the last hidden state of the base model (MiniCPM3 divides it); None for another
    relation."""

    @property
    def is_identity(self) -> bool:
        """Whether the output of the lm_head is the model's logits."""
        return self.scale == 1 and self.cap is None and self.bias_V is None

    def __call__(self, logits_nV: Tensor) -> Tensor:
        """Return the model's logits for the output of its lm_head."""
        if self.scale != 1:
            logits_nV = logits_nV * self.scale
        if self.cap is not None:
            logits_nV = torch.tanh(logits_nV / self.cap) * self.cap
        return logits_nV if self.bias_V is None else logits_nV + self.bias_V.to(logits_nV)


class LogitsHead(nn.Module):
    """An lm_head with the operations after it."""

    def __init__(self, lm_head: nn.Module, after: LogitsMap) -> None:
        super().__init__()
        self.lm_head, self.after = lm_head, after

    @property
    def weight(self) -> Tensor:
        """The weight [V, H] of the lm_head."""
        return weight_of(self.lm_head)

    def forward(self, states_nH: Tensor) -> Tensor:
        return self.after(self.lm_head(states_nH))


def logits_head(model: PreTrainedModel) -> nn.Module:
    """Return the map from `final_states` to logits: the lm_head, with the operations after it where there are any.

    Raises:
        ConfigError: for a model without lm_head, or one whose logits are not explained by a `LogitsMap`.
    """
    after, lm_head = logits_map(model), model.get_output_embeddings()
    assert lm_head is not None, "checked by logits_map"
    return lm_head if after.is_identity else LogitsHead(lm_head, after)


PLAIN = (nn.Parameter, Tensor, FakeTensor)
"""Types of weights whose rows can be taken; fake ones are those of the memory estimate."""
NUMBERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of weights whose elements are their values; 8-bit and packed ones need scales that are stored elsewhere."""


def draft_rows_of(lm_head: Callable[[Tensor], Tensor], tokens_D: Tensor) -> nn.Module | None:
    """Return the map from states [n, H] to the logits [n, D] of some tokens, whose rows it copies.

    None for an lm_head that is not a linear layer with a plain weight: a quantized one has no such rows.
    """
    linear, after = (lm_head.lm_head, lm_head.after) if isinstance(lm_head, LogitsHead) else (lm_head, LogitsMap())
    if not isinstance(linear, nn.Linear) or type(linear.weight) not in PLAIN:
        return None
    tokens_D = tokens_D.to(linear.weight.device)
    rows = nn.Linear(linear.in_features, len(tokens_D), bias=linear.bias is not None, device="meta")
    for name, value in linear.named_parameters():
        setattr(rows, name, nn.Parameter(value.detach()[tokens_D], requires_grad=False))
    if after.bias_V is not None:
        after = replace(after, bias_V=after.bias_V.to(tokens_D.device)[tokens_D])
    return rows if after.is_identity else LogitsHead(rows, after)


def lm_head_weight(model: PreTrainedModel) -> Tensor:
    """Return the weight [V, H] of the lm_head, which drafters copy, or whose size and dtype they read.

    Raises:
        ConfigError: for a model without lm_head, or with a quantized one.
    """
    name, lm_head = type(model).__name__, model.get_output_embeddings()
    if lm_head is None:
        raise ConfigError(f"model {name} has no lm_head; expected a causal language model")
    weight = getattr(lm_head, "weight", None)
    if not isinstance(weight, Tensor) or weight.dtype not in NUMBERS:
        held = f"weights of {weight.dtype}" if isinstance(weight, Tensor) else f"{type(lm_head).__name__} without any"
        raise ConfigError(
            f"model {name} has a quantized lm_head ({held}); expected one in 16 bits or more: leave the lm_head out of "
            "the quantization"
        )
    return weight


def scaled_weight(model: PreTrainedModel) -> Tensor:
    """Return the weight [V, H] of the lm_head times the model's scale of logits, to initialise other lm_heads with."""
    scale, weight_VH = logits_map(model).scale, lm_head_weight(model)
    return weight_VH if scale == 1 else weight_VH * scale


@torch.no_grad()
def copy_lm_head(
    model: PreTrainedModel, heads: Sequence[nn.Linear], tokens: list[int] | None
) -> "DraftVocabulary | None":
    """Copy the model's lm_head into other ones, or its rows of `tokens`, whose draft vocabulary is returned.

    With the model's scale of logits. Heads that read states of another size keep their weights.
    """
    weight_VH, vocabulary = scaled_weight(model), None
    if tokens is not None:
        vocabulary = DraftVocabulary.of(tokens, len(weight_VH)).to(heads[0].weight.device)
        weight_VH = weight_VH[vocabulary.tokens_D.to(weight_VH.device)]
    for head in heads:
        if head.in_features == weight_VH.shape[1]:
            head.weight.copy_(weight_VH)
            if head.bias is not None:
                nn.init.zeros_(head.bias)
    return vocabulary


_MEASURED: "WeakKeyDictionary[PreTrainedModel, LogitsMap]" = WeakKeyDictionary()


def logits_map(model: PreTrainedModel) -> LogitsMap:
    """Return the operations of `model` before and after its lm_head, measured once.

    A model without data, of which only the memory is estimated, counts as one without such operations.

    Raises:
        ConfigError: see `logits_head`.
    """
    lm_head_weight(model)
    name = type(model).__name__
    if not has_data(model):
        return LogitsMap()
    require_in_memory(model)
    if model not in _MEASURED:
        try:
            probe = _run(model)
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError) as error:
            raise ConfigError(
                f"model {name} cannot be run on token ids alone ({reason_of(error)}); expected a causal language model"
            ) from error
        fitted = _fitted(probe)
        if fitted is None:
            raise ConfigError(
                f"model {name} transforms its logits after the lm_head in an unknown way; "
                "expected logits = cap * tanh(scale * lm_head(states) / cap) + bias, each of them optional"
            )
        _MEASURED[model] = fitted
    return _MEASURED[model]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Turn off dropout, in a model that may be in training mode as a whole or in part."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


PROBED = 4
"""Positions of the probe: zeros, ones, `HUGE` and values of all magnitudes."""
HUGE = 1e30


class _Probe:
    """Tensors of one pass whose output of the lm_head was replaced."""

    logits_TV: Tensor | None = None
    """The replacement."""
    result: Tensor
    """The model's logits for it."""
    entry_TH: Tensor
    """Input of the lm_head."""
    final_TH: Tensor | None = None
    """Last hidden state of the base model; None where the model does not call it."""

    def replace(self, _: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Forward hook of the lm_head."""
        self.entry_TH = arguments[0][0]
        generator, V = torch.Generator().manual_seed(0), output.shape[-1]
        spread_V = 10 ** (torch.rand(V, generator=generator, dtype=torch.float64) * 6 - 2)
        spread_V *= torch.randn(V, generator=generator).sign()
        rows = [torch.zeros_like(spread_V), torch.ones_like(spread_V), torch.full_like(spread_V, HUGE), spread_V]
        self.logits_TV = torch.stack(rows)  # in float64, so that a target in bfloat16 is measured exactly
        return self.logits_TV.to(output.device, copy=True)[None]

    def keep_final(self, _: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the base model."""
        state = getattr(output, "last_hidden_state", None)
        self.final_TH = None if state is None else state[0]


@torch.no_grad()
def _run(model: PreTrainedModel) -> _Probe:
    """Run the model on a few tokens with the output of its lm_head replaced."""
    probe = _Probe()
    lm_head = model.get_output_embeddings()
    assert lm_head is not None, "checked by logits_map"
    ids_1T = torch.arange(PROBED, device=next(model.parameters()).device)[None]
    inputs = {"input_ids": ids_1T} | ({"decoder_input_ids": ids_1T} if model.config.is_encoder_decoder else {})
    hooks = [lm_head.register_forward_hook(probe.replace), model.base_model.register_forward_hook(probe.keep_final)]
    try:
        with evaluating(model):
            probe.result = model(**inputs, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return probe


def _fitted(probe: _Probe) -> LogitsMap | None:
    """Return the map that explains every number of the probe to rounding; None if there is none."""
    given_TV, result = probe.logits_TV, probe.result.cpu()
    # Half precision would hide a weak cap; a model that calls no lm_head leaves no replacement.
    if given_TV is None or result.shape != (1, *given_TV.shape) or result.dtype not in (torch.float32, torch.float64):
        return None
    room = 16 * torch.finfo(result.dtype).eps
    result_TV = result[0].double()
    bias_V = result_TV[0]
    at_one, at_huge = (float((result_TV[row] - bias_V).mean()) for row in (1, 2))
    cap = at_huge if at_huge < math.sqrt(HUGE) else None
    if not at_one > 0 or (cap is not None and at_one >= cap):
        return None
    scale = at_one if cap is None else cap * math.atanh(at_one / cap)
    fitted = LogitsMap(
        scale=1.0 if abs(scale - 1) <= room else scale,
        cap=cap,
        bias_V=bias_V if bias_V.any() else None,
        state_scale=_state_scale(probe),
    )
    explained = torch.allclose(fitted(given_TV), result_TV, rtol=room, atol=room)
    return fitted if explained and float(bias_V.abs().max()) < math.sqrt(HUGE) else None


def _state_scale(probe: _Probe) -> float | None:
    """Return the factor between the base model's last hidden state and the input of the lm_head; None without one."""
    if probe.final_TH is None or probe.final_TH.shape != probe.entry_TH.shape:
        return None
    entry_TH, final_TH = probe.entry_TH.double(), probe.final_TH.double()
    if torch.equal(entry_TH, final_TH):
        return 1.0
    factor = float((entry_TH * final_TH).sum() / final_TH.square().sum())
    room = 4 * torch.finfo(probe.entry_TH.dtype).eps * entry_TH.abs().max()
    return factor if (entry_TH - factor * final_TH).abs().max() <= room else None


class DraftVocabulary(nn.Module):
    """Map between the D rows of a drafter's lm_head and tokens of the target; stored with the weights.

    Tokens without a row have a draft probability of exactly zero: they are never drafted, and decoding stays lossless.
    """

    d2t: Tensor
    """[D] int64: token = row + d2t[row]."""
    t2d: Tensor
    """[V] bool: the tokens that have a row."""

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__()
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(vocab_size, dtype=torch.bool))

    @classmethod
    def of(cls, tokens: list[int], vocab_size: int) -> "DraftVocabulary":
        """Return the vocabulary of these distinct tokens."""
        if not tokens or len(set(tokens)) < len(tokens) or not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise ConfigError(f"draft vocabulary of {len(tokens)} tokens; expected distinct ids below {vocab_size}")
        vocabulary = cls(vocab_size, len(tokens))
        ids_D = torch.tensor(sorted(tokens))
        vocabulary.d2t.copy_(ids_D - torch.arange(len(tokens)))
        vocabulary.t2d[ids_D] = True
        return vocabulary

    def __len__(self) -> int:
        return self.d2t.shape[0]

    @property
    def tokens_D(self) -> Tensor:
        """The token of each row, [D]."""
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    def expand(self, logits_nD: Tensor) -> Tensor:
        """Return logits [..., V] over the target's vocabulary: -inf for tokens without a row."""
        logits_nV = logits_nD.new_full((*logits_nD.shape[:-1], self.t2d.shape[0]), -torch.inf)
        logits_nV[..., self.tokens_D] = logits_nD
        return logits_nV

    def fingerprint(self) -> str:
        """Return a hash of the tokens."""
        return fingerprint(self.tokens_D.tolist())

    def require_consistent(self, name: object) -> None:
        """Raise ConfigError unless `d2t` and `t2d` describe the same tokens."""
        tokens_D, named = self.tokens_D, self.t2d.nonzero()[:, 0]
        if not torch.equal(named, tokens_D) and torch.equal(named, self.d2t):
            raise ConfigError(f"drafter={name}: d2t holds the tokens themselves; expected offsets (token - row)")
        if tokens_D.min() < 0 or tokens_D.max() >= self.t2d.shape[0]:
            raise ConfigError(
                f"drafter={name}: d2t leads outside the vocabulary of {self.t2d.shape[0]}; expected offsets"
            )
        if not torch.equal(named, tokens_D):
            raise ConfigError(f"drafter={name}: d2t and t2d name different tokens; expected one draft vocabulary")


def most_frequent(counts_V: Tensor, size: int, always: tuple[int, ...] = ()) -> list[int]:
    """Return the `size` most frequent tokens, including those in `always`; ties go to the lower id."""
    counts_V = counts_V.clone().double()
    counts_V[list(always)] = torch.inf
    order = sorted(range(len(counts_V)), key=lambda token: (-float(counts_V[token]), token))
    return sorted(order[:size])


def checked_size(size: int | None, vocab_size: int) -> int | None:
    """Return `size`, or None for the whole vocabulary; raise ConfigError when it is larger than that."""
    if size is not None and not 1 <= size <= vocab_size:
        raise ConfigError.of("drafter.draft_vocab_size", size, f"1 to {vocab_size}, the target's vocabulary")
    return None if size == vocab_size else size


def logit_count(model: PreTrainedModel) -> int:
    """Return the number of logits of a target, which may exceed its tokenizer's vocabulary; ConfigError without any."""
    lm_head = model.get_output_embeddings()
    if lm_head is None:
        raise ConfigError(f"target {type(model).__name__} has no lm_head; expected a causal language model")
    return lm_head.weight.shape[0]
