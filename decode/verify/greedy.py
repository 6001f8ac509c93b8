"""Greedy verification: the target's argmax, nothing else."""

from draftsmith.decode.verify.verdict import Verdict
from draftsmith.heads.draft import ROOT, Draft


def verify_greedy(target_tokens: list[int], draft: Draft) -> Verdict:
    """Descend while a child equals the target's argmax, then emit the argmax.

    `target_tokens`: [N + 1], the argmax behind the root and behind each node.
    """
    if draft.is_chain:
        tokens, accepted = draft.tokens, 0
        while accepted < len(tokens) and tokens[accepted] == target_tokens[accepted]:
            accepted += 1
        overlap = (1.0,) * accepted + ((0.0,) if accepted < len(tokens) else ())
        return Verdict(tuple(range(accepted)), target_tokens[accepted], overlap)
    children = draft.children
    node, path = ROOT, []
    while True:
        wanted = target_tokens[node + 1]
        below = children[node + 1]
        match = next((child for child in below if draft.tokens[child] == wanted), None)
        if match is None:
            overlap = (1.0,) * len(path) + ((0.0,) if below else ())
            return Verdict(tuple(path), wanted, overlap)
        path.append(match)
        node = match
