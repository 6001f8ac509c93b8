"""Verification rules: pure functions of (p, draft, chance) that keep the output distribution exactly the target's."""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decode.chance import Chance
from draftsmith.errors import DraftsmithError
from draftsmith.heads.draft import Draft

# Shapes: G draft tokens (gamma), V vocabulary.


@dataclass(frozen=True)
class Verdict:
    """What one verification decided."""

    accepted: int
    """How many draft tokens are kept, from the first on."""
    next_token: int
    """The correction after a rejection, or the bonus token after the last draft token."""
    overlap: tuple[float, ...]
    """Sum over v of min(p_v, q_v) at each position that was tested; 1.0 or 0.0 under greedy decoding."""


def _require_chain(draft: Draft) -> None:
    if not draft.is_chain:
        raise DraftsmithError(f"draft.parents={draft.parents}; expected a chain: these rules do not verify trees")


def verify_greedy(target_tokens: list[int], draft: Draft) -> Verdict:
    """Keep the draft tokens that equal the target's argmax. `target_tokens`: [G + 1], the argmax at each position."""
    _require_chain(draft)
    accepted = 0
    while accepted < len(draft) and draft.tokens[accepted] == target_tokens[accepted]:
        accepted += 1
    overlap = (1.0,) * accepted + (0.0,) * (accepted < len(draft))
    return Verdict(accepted, target_tokens[accepted], overlap)


def verify_token_rule(p_PV: Tensor, draft: Draft, chance: Chance) -> Verdict:
    """Accept x ~ q with probability min(1, p/q); after the first rejection draw from norm(max(p - q, 0)).

    Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1. `p_PV`: [G + 1, V], the target's distribution behind the last
    committed token and behind each draft token. A draft without q holds point masses: q is 1 at the token itself.
    Lossless whatever q is, provided that each token was drawn from its row of q.
    """
    _require_chain(draft)
    G = len(draft)
    if G == 0:
        return Verdict(0, chance.categorical(p_PV[0]), ())
    q_GV = draft.q_NV if draft.q_NV is not None else point_masses(draft, p_PV)
    overlap_G = torch.minimum(p_PV[:G], q_GV).sum(-1).tolist()
    tokens_G1 = torch.tensor(draft.tokens, device=p_PV.device)[:, None]
    p_tokens = p_PV[:G].gather(1, tokens_G1)[:, 0].tolist()
    q_tokens = q_GV.gather(1, tokens_G1)[:, 0].tolist()
    for i in range(G):
        if p_tokens[i] >= q_tokens[i] or chance.bernoulli(p_tokens[i] / q_tokens[i]):
            continue
        return Verdict(i, chance.categorical(residual(p_PV[i], q_GV[i])), tuple(overlap_G[: i + 1]))
    return Verdict(G, chance.categorical(p_PV[G]), tuple(overlap_G))


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """max(p - q, 0), unnormalised: what the target still owes after a rejection. [V]

    A rejection implies p < q at the token, hence p > q elsewhere; only rounding can leave nothing, when p and q are
    equal up to the last bit. Then p itself is what the residual tends to.
    """
    rest_V = (p_V - q_V).clamp_min(0)
    return rest_V if rest_V.any() else p_V


def point_masses(draft: Draft, p_PV: Tensor) -> Tensor:
    """q of deterministic draft tokens: [G, V], one at each token."""
    q_GV = p_PV.new_zeros(len(draft), p_PV.shape[-1])
    q_GV[torch.arange(len(draft)), torch.tensor(draft.tokens, device=p_PV.device)] = 1
    return q_GV
