"""The start of an untrained drafter, measured on a first batch: it predicts about as well as a constant distribution.

An lm_head copied from the target is confidently wrong on states that it was not made for: on published models such a
drafter starts with a loss far above that of equal probabilities, and its logits move by tens of nats a step. Here the
logits of a new drafter become those of the tokens' frequencies u in the responses, plus a part of the copied lm_head's:

    own lm_head         W z  becomes  share * W (z - mean z) + log u,    with log u added as log u m^T z,  m.z = 1
    target's lm_head    the drafter's state becomes  share * (h - mean h) + c,    with lm_head(c) = log u + constant

Drafters whose first layer reads a state and the next token's embedding, and whose lm_head is the target's, begin with
the linear prediction of the target's next state (`Regression`).

Only existing weights change. Inputs z of language models have a large constant part (massive activations: Sun et al.
2024, arXiv:2402.17762), which is why some m has m.z close to 1 for all z.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.heads.base import DraftStates, TeacherSignals, TrainableDrafter

# Shapes: n sampled states, F inputs of a linear layer, V vocabulary, D draft vocabulary, H hidden size.

SAMPLED = 256
"""Most states from which a layer is measured."""
SPREAD = 0.45
"""Standard deviation in nats, over the tokens by frequency, of the copied lm_head's part of the logits. Where that part
says nothing about the next token, it costs about SPREAD ** 2 / 2 = 0.1 nats."""
RIDGE = 0.1
"""Penalty of the ridge regression in `constant_reader`, relative to the mean square of the inputs."""

REGRESSED = 16
"""Tokens for each input of the layer that `Regression` fits."""
PENALTY = 0.5
"""Penalty of `Regression` relative to the mean square of each input, times inputs per token."""


def frequencies(counts_V: Tensor) -> Tensor:
    """Return the probability of each token from counts; tokens that never occurred share that of tokens seen once.

    Good 1953: the probability of all unseen tokens together is about the share of the tokens that occurred once.
    """
    counts_V = counts_V.double()
    unseen = ((counts_V == 1).sum().clamp_min(1) / counts_V.sum().clamp_min(1)).clamp_max(0.5)
    return ((1 - unseen) * counts_V / counts_V.sum().clamp_min(1) + unseen / len(counts_V)).float()


def silence(network: nn.Module) -> None:
    """Let the attention and MLPs of a network add nothing; their first updates come through the zeroed matrices."""
    for name, weight in network.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)


def final_states_of(signals: TeacherSignals) -> Tensor:
    """Return the target's final states [n, H] at trained positions, sampled."""
    return sampled(signals.hidden_BTH[signals.mask_BT])


def sampled(states_nF: Tensor) -> Tensor:
    """Return at most `SAMPLED` of the rows, evenly spaced, in float32."""
    indices = torch.linspace(0, len(states_nF) - 1, min(SAMPLED, len(states_nF)), device=states_nF.device).long()
    return states_nF[indices].float()


def next_states(signals: TeacherSignals) -> tuple[Tensor, Tensor, Tensor]:
    """Return features [n, F'], the tokens [n] after them, and the target's states [n, H] at these tokens.

    Of all neighbours in one document, in prompts as well as answers, whose states are finite and not all zero: those of
    a text's last token may be missing, and those of a whole row.
    """
    ids_BT, hidden_BTH = signals.input_ids_BT, signals.hidden_BTH
    features_BTF = hidden_BTH if signals.features_BTF is None else signals.features_BTF
    kept_BT = signals.attention_mask_BT.bool() & hidden_BTH.isfinite().all(-1) & features_BTF.isfinite().all(-1)
    kept_BT &= hidden_BTH.any(-1)
    pairs_BT = kept_BT[:, :-1] & kept_BT[:, 1:]
    if signals.documents_BT is not None:
        pairs_BT &= signals.documents_BT[:, :-1] == signals.documents_BT[:, 1:]
    return features_BTF[:, :-1][pairs_BT], ids_BT[:, 1:][pairs_BT], hidden_BTH[:, 1:][pairs_BT]


class Regression(NamedTuple):
    """The best linear prediction y = W z of the target's next state, and some of the samples that it is fitted to."""

    weight_HF: Tensor
    inputs_nF: Tensor
    wanted_nH: Tensor

    @classmethod
    def of(cls, batches: Iterable[TeacherSignals], inputs: Callable[[Tensor, Tensor], Tensor]) -> "Regression":
        """Fit W to the first `REGRESSED` tokens for each input, or to all there are, by ridge regression.

        `inputs`: maps features [n, F'] and next tokens [n] to z [n, F].
        """
        count, gram_FF, cross_FH, first = 0, torch.zeros(()), torch.zeros(()), None
        for signals in batches:
            features_nF, tokens_n, wanted_nH = next_states(signals)
            z_nF, wanted_nH = inputs(features_nF, tokens_n).float(), wanted_nH.float()
            gram_FF, cross_FH = z_nF.T @ z_nF + gram_FF.to(z_nF), z_nF.T @ wanted_nH + cross_FH.to(z_nF)
            first, count = first or (sampled(z_nF), sampled(wanted_nH)), count + len(z_nF)
            if count >= REGRESSED * z_nF.shape[1]:
                break
        assert first is not None, "there is a first batch"
        solved_FF = gram_FF.cpu().double()
        squares_F = solved_FF.diagonal().clamp_min(1e-9 * float(solved_FF.diagonal().max()) + 1e-30)
        solved_FF.diagonal().add_(squares_F * PENALTY * len(squares_F) / max(1, count))
        weight_FH = torch.linalg.solve(solved_FF, cross_FH.cpu().double())
        return cls(weight_FH.T.to(gram_FF), *first)


def inputs_of(module: nn.Module, run: Callable[[], object]) -> Tensor:
    """Return the inputs [n, F] that `module` gets while `run` is called, sampled."""
    seen: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].flatten(0, -2)))
    try:
        run()
    finally:
        hook.remove()
    return sampled(torch.cat(seen))


def typical_sizes(states_nF: Tensor) -> Tensor:
    """Return the typical absolute value [F] of each column, scaled to the standard deviation of a normal distribution.

    From medians: the states of a first token may be a thousand times as large as all others.
    """
    sizes_F = states_nF.abs().median(0).values / 0.6745
    return sizes_F.clamp_min(float(sizes_F.median()) / 100).clamp_min(1e-6)


def constant_reader(inputs_nF: Tensor) -> Tensor:
    """Return m [F] with m.z close to 1 for the inputs z, by ridge regression; below 1 without a constant part of z."""
    z_nF = inputs_nF.double()
    gram_nn = z_nF @ z_nF.T
    gram_nn.diagonal().add_(RIDGE * gram_nn.diagonal().mean().clamp_min(1e-12))
    ones_n = torch.ones(len(z_nF), dtype=z_nF.dtype, device=z_nF.device)
    return (z_nF.T @ torch.linalg.solve(gram_nn, ones_n)).float()


def copied_share(logits_nV: Tensor, frequencies_V: Tensor) -> float:
    """Return the factor, at most 1, that gives the logits the standard deviation `SPREAD`, each token by frequency."""
    centred_nV = logits_nV - logits_nV.mean(0)
    mean_n, square_n = centred_nV @ frequencies_V, centred_nV.square() @ frequencies_V
    spread = float((square_n - mean_n.square()).clamp_min(0).mean().sqrt())
    return min(1.0, SPREAD / max(spread, 1e-9))


def best_state(head: Callable[[Tensor], Tensor], frequencies_V: Tensor, hidden_size: int) -> Tensor:
    """Return the state [H] for which `head` gives the probabilities closest to `frequencies_V` by KL divergence."""
    state_H = torch.zeros(hidden_size, device=frequencies_V.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([state_H], max_iter=40, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        state_H.grad = None
        value = -(frequencies_V * head(state_H[None])[0].float().log_softmax(-1)).sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)  # pyright: ignore[reportArgumentType]  # torch types the closure's result as a float
    return state_H.detach()


@dataclass(frozen=True, eq=False)
class InputScales:
    """The scales of a linear layer's inputs."""

    columns_F: Tensor
    """See `typical_sizes`."""
    total: float
    """Median over the inputs of their sum of absolute values: by how much an output moves per unit of a weight's."""

    @classmethod
    def of(cls, inputs_nF: Tensor) -> "InputScales":
        return cls(typical_sizes(inputs_nF), float(inputs_nF.abs().sum(-1).median()))


@torch.no_grad()
def input_scales(drafter: TrainableDrafter, signals: TeacherSignals) -> dict[Tensor, InputScales]:
    """Return the input scales of the drafter's layer on the target's features and of its own lm_heads, by weight."""
    scales: dict[Tensor, InputScales] = {}
    layer, heads = drafter.feature_layer(), drafter.own_lm_heads()
    if layer is not None:
        scales[layer.weight] = InputScales.of(drafter.feature_inputs(signals))
    unrolled = drafter.unroll(signals) if heads else []
    for head in dict.fromkeys(heads):
        entries = [entry for entry, own in zip(unrolled, heads, strict=True) if own is head]
        scales[head.weight] = InputScales.of(lm_head_inputs(head, entries, signals))
    return scales


@torch.no_grad()
def fit_start(
    drafter: TrainableDrafter, signals: TeacherSignals, frequencies_V: Tensor, more: Iterable[TeacherSignals] = ()
) -> None:
    """Change the weights of an untrained drafter so that it predicts at least as well as a constant distribution.

    `more`: further batches, of which drafters that begin with a regression take as many as it needs.
    """
    vocabulary = drafter.draft_vocabulary
    u_D = frequencies_V if vocabulary is None else frequencies_V[vocabulary.tokens_D.to(frequencies_V.device)]
    u_D = u_D / u_D.sum()
    drafter.start_body(signals, u_D)
    drafter.start_on_next_states(chain([signals], more))
    if heads := drafter.own_lm_heads():
        _start_lm_heads(drafter.unroll(signals), heads, signals, u_D)


def _start_lm_heads(
    unrolled: Sequence[DraftStates], heads: Sequence[nn.Linear], signals: TeacherSignals, frequencies_D: Tensor
) -> None:
    """Change the drafter's own lm_heads, one for each draft position, some of them the same module."""
    for head in dict.fromkeys(heads):
        entries = [entry for entry, own in zip(unrolled, heads, strict=True) if own is head]
        z_nF = lm_head_inputs(head, entries, signals)
        u_D = frequencies_D.to(head.weight.device)
        wanted_D = u_D.log() - u_D.log().mean()
        share, mean_F = copied_share(z_nF @ head.weight.float().T, u_D), z_nF.mean(0)
        added_D = wanted_D - share * (head.weight @ mean_F.to(head.weight))
        head.weight.mul_(share).addr_(added_D.to(head.weight), constant_reader(z_nF).to(head.weight))


def lm_head_inputs(head: nn.Linear, entries: Sequence[DraftStates], signals: TeacherSignals) -> Tensor:
    """Return the inputs [n, F] of an lm_head for the trained states of some draft positions, sampled."""
    states = [sampled(_trained(entry, signals)) for entry in entries]
    states = [state_nD[:: len(states)] for state_nD in states]
    return inputs_of(
        head, lambda: [entry.head(state.to(head.weight)) for entry, state in zip(entries, states, strict=True)]
    )


def _trained(entry: DraftStates, signals: TeacherSignals) -> Tensor:
    """Return the states [n, D] of an entry that are trained; all of them where the batch trains none."""
    kept_N = entry.trained(signals.mask_BT)
    return entry.states_ND[kept_N] if kept_N.any() else entry.states_ND
