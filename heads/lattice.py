"""LiLiCorr: transitions between candidates, scored by a small transformer over all candidates of a block.

    candidate of a position: embedding + state + probability and rank ──▶ layers over all candidates ──▶ unit vectors
    score of candidate j after candidate i of the position before = scale * <out_i, in_j>

The first position's scores are scale * <out of the last features before the block, in_j>. A token that was no candidate
of the position before, which walks never draw, leaves the states' log-probabilities as scores.

Rusanovsky et al. 2026, arXiv:2608.20530; the names of the weights are those of NVIDIA's first exports, see `ENGINES`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize, scaled_dot_product_attention, silu

from draftsmith.errors import ConfigError
from draftsmith.heads.layers import RMSNorm
from draftsmith.heads.transitions import Block, CandidateTransitions

# Shapes: n blocks, K positions, k candidates, S = K * k, M width of the drafter, H width of the layers, h heads, F size
# of the vectors, R = k + 3 rows: scores after each candidate of the position before, after others; these candidates, as
# tokens and as rows of the logits.

ENGINES = {"feature_mlp.0.": "feature_norm.", "feature_mlp.1.": "feature_mlp.up_proj."}
ENGINES |= {"feature_mlp.3.": "feature_mlp.down_proj.", ".mlp.0.": ".mlp.up_proj.", ".mlp.2.": ".mlp.down_proj."}
"""Parts of the names of weights, and those of vLLM 0.32 and SGLang 0.5.23, which refuse or rename the former."""
FEATURES = 5
"""Log-probability of a candidate, probability, distance from the best one, rank from 0 to 1, whether it is the best."""


@dataclass(frozen=True)
class LatticeOptions:
    """Options of a `LatticeReranker`, see `DFlashSection`; published values but for the first, 0 for none."""

    lilicorr_candidate_topk: int = 0
    lilicorr_hidden_size: int = 1024
    lilicorr_num_layers: int = 2
    lilicorr_num_heads: int = 8
    lilicorr_mlp_ratio: float = 2.0
    lilicorr_factor_dim: int = 1024
    lilicorr_vector_eps: float = 1e-4
    lilicorr_logit_scale: float = 8.0


class LatticeLayer(nn.Module):
    """Attention with a bias by distance and an MLP, both after a norm."""

    def __init__(self, size: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = RMSNorm(size, eps=eps), RMSNorm(size, eps=eps)
        self.attn = nn.MultiheadAttention(size, heads)
        self.mlp = nn.Sequential(nn.Linear(size, inner), nn.SiLU(), nn.Linear(inner, size))

    def forward(self, x_nSH: Tensor, bias_hSS: Tensor) -> Tensor:
        attn, read_nSH = self.attn, self.attn_norm(x_nSH)
        qkv_nSX = linear(read_nSH, attn.in_proj_weight, attn.in_proj_bias)
        q, k, v = (x.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) for x in qkv_nSX.chunk(3, -1))
        out_nhSd = scaled_dot_product_attention(q, k, v, bias_hSS.to(q.dtype)[None])
        x_nSH = x_nSH + attn.out_proj(out_nhSd.transpose(1, 2).flatten(2))
        return x_nSH + self.mlp(self.mlp_norm(x_nSH))


class LatticeReranker(CandidateTransitions):
    """LiLiCorr's head for blocks of `block_size` positions, of which the first predicts nothing."""

    def __init__(self, width: int, block_size: int, rms_norm_eps: float, options: LatticeOptions) -> None:
        super().__init__(options.lilicorr_candidate_topk)
        self.options = options
        size, heads = options.lilicorr_hidden_size or width, options.lilicorr_num_heads
        if size % heads:
            raise ConfigError.of("lilicorr_num_heads", heads, f"a divisor of lilicorr_hidden_size={size}")
        inner, dim = int(size * options.lilicorr_mlp_ratio), options.lilicorr_factor_dim
        self.token_proj = nn.Identity() if size == width else nn.Linear(width, size)
        self.pass_hidden_proj, self.context_proj = nn.Linear(width, size), nn.Linear(width, size)
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(FEATURES), nn.Linear(FEATURES, size), nn.SiLU(), nn.Linear(size, size)
        )
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, block_size - 1, 1, size))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, self.top_k, size))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        layers = (LatticeLayer(size, heads, inner, rms_norm_eps) for _ in range(options.lilicorr_num_layers))
        self.layers = nn.ModuleList(layers)
        self.output_norm, self.anchor_norm = RMSNorm(size, eps=rms_norm_eps), RMSNorm(size, eps=rms_norm_eps)
        self.factor_input_proj = nn.Linear(3 * size, size)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(size, dim) for _ in range(3))

    def initial_state(self, block: Block) -> Tensor:
        """Return the rows of each position, and of one after the last for its tokens, [..., K + 1, R, k]."""
        k, shape, (log_probs_nKk, best_nKk) = self.top_k, block.states_nKM.shape[:-2], block.best(self.top_k)
        tokens_nKk = block.tokens(best_nKk)
        embeds_nKkM, flat_nKk = block.embed(tokens_nKk).flatten(0, -4), log_probs_nKk.flatten(0, -3)
        states_nKM, features_nM = block.states_nKM.flatten(0, -3), block.features().flatten(0, -2)
        start_nk, pairs_nJkk = self.potentials(embeds_nKkM, flat_nKk, states_nKM, features_nM)
        pairs_nJkk = pairs_nJkk.unflatten(0, shape)
        rows_nKRk = pairs_nJkk.new_zeros(*shape, tokens_nKk.shape[-2] + 1, k + 3, k)
        rows_nKRk[..., 0, : k + 1, :] = start_nk.view(*shape, 1, k)
        rows_nKRk[..., 1:-1, :k, :] = pairs_nJkk
        rows_nKRk[..., 1:-1, k, :] = log_probs_nKk[..., 1:, :]
        rows_nKRk[..., 1:, k + 1, :] = tokens_nKk.to(rows_nKRk.dtype)
        rows_nKRk[..., 1:, k + 2, :] = best_nKk.to(rows_nKRk.dtype)
        rows_nKRk[..., 0, k + 1, :] = -1
        return rows_nKRk

    def potentials(
        self, embeds_nKkM: Tensor, log_probs_nKk: Tensor, states_nKM: Tensor, features_nM: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the scores [n, k] of the first position, and [n, K - 1, k, k] of others after each candidate."""
        dtype, (K, k) = self.context_proj.weight.dtype, log_probs_nKk.shape[1:]
        x_nKkH = self.token_proj(embeds_nKkM.to(dtype)) + self.pass_hidden_proj(states_nKM.to(dtype))[:, :, None]
        x_nKkH = x_nKkH + self.feature_mlp(self._features(log_probs_nKk).to(x_nKkH.dtype))
        x_nSH = (x_nKkH + self.slot_embedding[0] + self.rank_embedding[0]).flatten(1, 2)
        bias_hSS = self._bias(K)
        for layer in self.layers:
            x_nSH = layer(x_nSH, bias_hSS)
        x_nSH = self.output_norm(x_nSH)
        anchor_nH = self.anchor_norm(self.context_proj(features_nM.to(dtype)))
        anchor_nSH = anchor_nH[:, None].expand_as(x_nSH)
        x_nSH = silu(self.factor_input_proj(torch.cat([x_nSH, anchor_nSH, x_nSH * anchor_nSH], -1)))
        out_nKkF, in_nKkF = (self._unit(head(x_nSH)).unflatten(1, (K, k)) for head in (self.out_head, self.in_head))
        start_nk = (in_nKkF[:, 0] @ self._unit(self.anchor_out_head(anchor_nH))[:, :, None])[..., 0]
        pairs_nJkk = out_nKkF[:, :-1] @ in_nKkF[:, 1:].transpose(-1, -2)
        scale, exact = self.options.lilicorr_logit_scale, torch.promote_types(start_nk.dtype, torch.float32)
        return scale * start_nk.to(exact), scale * pairs_nJkk.to(exact)

    def _features(self, log_probs_nKk: Tensor) -> Tensor:
        ranks_k = torch.arange(self.top_k, device=log_probs_nKk.device) / max(self.top_k - 1, 1)
        best_nKk = log_probs_nKk - log_probs_nKk[..., :1]
        features = (log_probs_nKk, log_probs_nKk.exp(), best_nKk, ranks_k, (ranks_k == 0).float())
        return torch.stack([feature.expand_as(log_probs_nKk) for feature in features], -1)

    def _bias(self, K: int) -> Tensor:
        """Return the bias [h, S, S] of attention by the distance of two candidates' positions."""
        slots_S = torch.arange(K, device=self.same_slot_bias.device).repeat_interleave(self.top_k)
        apart_SS = slots_S[:, None] - slots_S
        bias_hSS = self.relative_slot_bias[:, apart_SS + self.relative_slot_bias.shape[1] // 2]
        return bias_hSS + (apart_SS == 0) * self.same_slot_bias[:, None, None]

    def _unit(self, x: Tensor) -> Tensor:
        return normalize(x, dim=-1, eps=self.options.lilicorr_vector_eps)

    def step(self, carried_nr: Tensor, before_n: Tensor, states_nH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores after the tokens, and the candidates that they are of."""
        k, rows_nRk = self.top_k, carried_nr[..., 0, :, :]
        same_nk = rows_nRk[..., k + 1, :] == before_n[..., None]
        row_n = torch.where(same_nk.any(-1), same_nk.int().argmax(-1), k)
        scores_nk = rows_nRk.gather(-2, row_n[..., None, None].expand(*row_n.shape, 1, k))[..., 0, :]
        return torch.cat([scores_nk, carried_nr[..., 1, k + 2, :]], -1), carried_nr[..., 1:, :, :]

    def candidates(self, logits_nD: Tensor, values_nX: Tensor) -> Tensor:
        return values_nX[..., self.top_k :].round().long()

    def scores(self, unary_nk: Tensor, candidates_nk: Tensor, values_nX: Tensor) -> Tensor:
        return values_nX[..., : self.top_k]

    def score_parameters(self) -> list[nn.Parameter]:
        return []
