"""DFlash: a small block-diffusion model that predicts all masked tokens of a block in one pass; DSpark and DFlash 2.

    features of all committed tokens ──▶ fc ──▶ norm ──▶ keys and values of every layer
                                                            ▲
    block:   x_a   mask  mask  mask  ──▶ layers: each position of the block sees the others and the features
              │     │     │     └──▶ target's lm_head ──▶ d3
              │     │     └────────▶ d2        (+ transitions from the token before)
              │     └──────────────▶ d1
              └ anchor: the last committed token

With `sample_from_anchor`, every position predicts the token after it: the anchor's d1, the last mask's d4.

Chen et al. 2026 (DFlash), arXiv:2602.06036. With `markov_rank` (DSpark), `selector_rank` (DFlash 2) or
`lilicorr_candidate_topk` (LiLiCorr), logits depend on the token before, see `transitions`. DFlash 2 has convolutions in
its layers, too. DSpark's `confidence_head` predicts the probability that each token is accepted, which can end a draft.
"""

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from draftsmith.errors import ConfigError
from draftsmith.heads.autoregressive import NetworkDrafter
from draftsmith.heads.base import Context, DraftStates, Level, TeacherSignals
from draftsmith.heads.block_convolution import ConvolutionOptions
from draftsmith.heads.block_network import QUERIES, AnchoredBlocks, DFlashNetwork, Visibility
from draftsmith.heads.eagle3 import default_mask_token
from draftsmith.heads.hidden_states import positions_like
from draftsmith.heads.initial_weights import best_state, copied_share, final_states_of, silence, typical_sizes
from draftsmith.heads.lattice import LatticeOptions, LatticeReranker
from draftsmith.heads.lm_head import weight_of
from draftsmith.heads.model_config import text_config
from draftsmith.heads.rows import Counts
from draftsmith.heads.sequence_part import SequencePart
from draftsmith.heads.transitions import (
    Block,
    CandidateSelector,
    MarkovBias,
    MarkovOptions,
    SelectorOptions,
    Transitions,
)

# Shapes: B rows, T positions, F size of the features, A anchors, b block size, K draft positions (b, or b - 1 where the
# anchor's position predicts nothing), S keys, H hidden size, h heads, d head size, V vocabulary, D draft vocabulary.

NEW_WINDOWS = {"causal_windows": False, "windows_from_anchor": False}
"""Windows of new drafters: each position sees as far in both directions, which all engines can compute."""


class DFlash(NetworkDrafter[DFlashNetwork]):
    """DFlash, with its options DSpark and DFlash 2: one pass per round for any draft length."""

    type: ClassVar[str] = "dflash"
    training_options: ClassVar[tuple[str, ...]] = ("anchors", "trained_mask")

    def __init__(
        self,
        body: LlamaConfig,
        *,
        layers: tuple[int, ...],
        block_size: int,
        anchors: int,
        sample_from_anchor: bool = False,
        windows: Sequence[int | None] | None = None,
        attention_sinks: bool = False,
        plain_target: bool = False,
        draft_vocab_size: int | None = None,
        confidence_head: bool = False,
        mask_token: int | None = None,
        **options: Any,
    ) -> None:
        """See `from_target`; `mask_token`: the one whose embedding the mask has, None if trained.

        Other options are fields of `Visibility`, `ConvolutionOptions`, `MarkovOptions`, `SelectorOptions` and
        `LatticeOptions`.
        """
        first, depth = 0 if sample_from_anchor else 1, body.num_hidden_layers
        seen = tuple(windows or [None] * depth)
        if len(seen) != depth or not all(size is None or (type(size) is int and size > 0) for size in seen):
            raise ConfigError.of("windows", windows, f"a number of tokens or null for each of the {depth} layers")
        options["windows"], outputs = seen, draft_vocab_size or body.vocab_size
        sees, convolution, markov, selector, lattice = _parts(options)
        candidates = lattice.lilicorr_candidate_topk
        if convolution.conv_kernel_size > block_size:
            said = f"at most the block size {block_size}"
            raise ConfigError.of("conv_kernel_size", convolution.conv_kernel_size, said)
        if convolution.conv_kernel_size and body.hidden_size % convolution.conv_group_size:
            said = f"a divisor of the width {body.hidden_size}"
            raise ConfigError.of("conv_group_size", convolution.conv_group_size, said)
        if markov.markov_rank and selector.selector_rank:
            raise ConfigError.of("selector_rank", selector.selector_rank, "0 with a markov_rank")
        if candidates and (markov.markov_rank or selector.selector_rank or sample_from_anchor):
            said = "0 with markov_rank, selector_rank or sample_from_anchor"
            raise ConfigError.of("lilicorr_candidate_topk", candidates, said)
        selected = selector.selector_top_k if selector.selector_rank else 0
        for key, count in {"lilicorr_candidate_topk": candidates, "selector_top_k": selected}.items():
            if count > outputs:
                raise ConfigError.of(key, count, f"at most the {outputs} tokens that it drafts")
        network = DFlashNetwork(
            body,
            len(layers),
            first,
            sees=sees,
            sinks=attention_sinks,
            plain_target=plain_target,
            draft_vocab_size=draft_vocab_size,
            block_size=block_size,
            convolution=convolution,
        )
        super().__init__(network, layers)
        self.block_size, self.anchors, self.mask_token = block_size, anchors, mask_token
        self.body.mask_embedding.requires_grad_(mask_token is None)
        sizes = body.vocab_size, outputs, body.hidden_size
        self.markov = MarkovBias(*sizes, markov) if markov.markov_rank else None
        self.selector = CandidateSelector(*sizes, selector) if selector.selector_rank else None
        of_block = body.hidden_size, block_size, body.rms_norm_eps
        self.lilicorr = LatticeReranker(*of_block, lattice) if candidates else None
        self.confidence = nn.Linear(body.hidden_size + markov.markov_rank, 1) if confidence_head else None
        self.max_draft_length = block_size - first

    @property
    def transitions(self) -> Transitions | None:
        """The dependence of logits on the token before; None where q depends on the committed text alone."""
        return self.markov or self.selector or self.lilicorr

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        block_size: int = 8,
        num_hidden_layers: int = 2,
        window: int | None = None,
        anchors: int = 64,
        mask_token: int | None = None,
        trained_mask: bool = False,
        **options: Any,
    ) -> Self:
        """Return layers of the target's width; for the options see `DFlashSection`.

        A `window` hides tokens that are further from a position; within it, all positions of a block see each other.
        """
        if block_size < 2:
            raise ConfigError.of("drafter.block_size", block_size, ">= 2: the anchor and one draft token")
        if anchors < 1:
            raise ConfigError.of("drafter.anchors", anchors, ">= 1")
        token = default_mask_token(target, mask_token)
        if window is not None:
            options |= {"windows": [window] * num_hidden_layers, **NEW_WINDOWS}
        drafter = super().from_target(
            target,
            num_hidden_layers=num_hidden_layers,
            block_size=block_size,
            anchors=anchors,
            mask_token=None if trained_mask else token,
            **options,
        )
        with torch.no_grad():
            device = weight_of(target.get_input_embeddings()).device
            drafter.body.mask_embedding.copy_(drafter.body.embed(torch.tensor(token, device=device)))
        return drafter

    @classmethod
    def default_layers(cls, target: PreTrainedModel) -> tuple[int, ...]:
        return five_depths(target)

    def outside_layers(self) -> list[nn.Parameter]:
        others = [module for module in (self.transitions, self.confidence) if module is not None]
        return [*super().outside_layers(), *(weight for module in others for weight in module.parameters())]

    @property
    def steps(self) -> int:
        return self.block_size - self.body.first

    def feature_layer(self) -> nn.Linear:
        return self.body.fc

    @torch.no_grad()
    def start_body(self, signals: TeacherSignals, frequencies_D: Tensor) -> None:
        """Begin with masks whose state, which no layer changes yet, predicts the tokens' frequencies."""
        body = self.body
        body.fc.weight.div_(typical_sizes(self.feature_inputs(signals)))
        silence(body)
        if body.lm_head is None:
            state_H = best_state(body.target_head, frequencies_D, body.config.hidden_size)
            nn.init.constant_(body.norm.weight, float(state_H.square().mean().sqrt().clamp_min(1e-3)))
        else:
            # Masks have one state, which does not show by how much the copied lm_head's logits vary.
            hidden_nH = final_states_of(signals)
            share = copied_share(hidden_nH @ body.lm_head.weight.float().T, frequencies_D)
            body.lm_head.weight.mul_(share * typical_sizes(hidden_nH))
            state_H = body.mask_embedding
        state_H = state_H / state_H.square().mean().sqrt().clamp_min(1e-6)
        if self.mask_token is None:
            body.mask_embedding.copy_(state_H)
        elif body.lm_head is None:
            body.turn_masks(state_H)

    def why_undivided(self) -> str | None:
        return None

    def section(self) -> dict[str, Any]:
        windows = [*self.body.sees.windows]
        window = windows[0] if len({*windows}) == 1 else windows
        return {**super().section(), "window": window}

    def unfreeze(self) -> None:
        super().unfreeze()
        self.body.mask_embedding.requires_grad_(self.mask_token is None)

    def train_further(self, trained_mask: bool | None = None, **options: Any) -> None:
        super().train_further(**options)
        if trained_mask:
            self.mask_token = None
            self.unfreeze()

    def options(self) -> dict[str, Any]:
        sees = self.body.sees
        return {
            "block_size": self.block_size,
            "anchors": self.anchors,
            "sample_from_anchor": self.body.first == 0,
            **vars(sees),
            "windows": list(sees.windows) if any(sees.windows) else None,
            "attention_sinks": self.body.sinks(0) is not None,
            "plain_target": self.body.plain_target,
            "draft_vocab_size": None if self.body.lm_head is None else self.body.lm_head.out_features,
            "confidence_head": self.confidence is not None,
            **vars(self.body.convolution),
            **vars(MarkovOptions() if self.markov is None else self.markov.options),
            **vars(SelectorOptions() if self.selector is None else self.selector.options),
            **vars(LatticeOptions() if self.lilicorr is None else self.lilicorr.options),
            "mask_token": self.mask_token,
        }

    def start(self, context: Context) -> None:
        super().start(context)
        # A block, and after a round at most as many features of committed tokens.
        self._runner = context.runner(self.body, width=2 * self.block_size + 1)
        self._read([len(sequence.tokens) - 1 for sequence in context.sequences])

    def _read(self, new: list[int]) -> None:
        """Read the features of the next `new` committed tokens and the block after them."""
        counts = Counts(new, self.body.mask_embedding.device)
        self._before_Bn = self.context.last_tokens_B1
        # The network reads the anchor, the first token of the block; masks take the other slots.
        block_Bb = nn.functional.pad(self._before_Bn, (0, self.block_size - 1))
        features_BCF = self.context.take_features(counts)
        self._logits_BKD = self._runner.block(block_Bb, features_BCF, counts)
        self._states_BKH = self._runner.states
        if self.transitions is not None:
            last_B1 = (counts.on_device_B - 1).clamp_min(0)[:, None]
            last, best = partial(self._projected, features_BCF, last_B1), partial(best_tokens, self._logits_BKD)
            block = Block(self._states_BKH, last, best, self._tokens, self.body.embed)
            self._start_B1r = self.transitions.initial_state(block)[:, None]

    def _projected(self, features_BCF: Tensor, positions_Bn: Tensor) -> Tensor:
        """Return the projected features [B, n, H] at some positions."""
        features_BnF = features_BCF.gather(1, positions_Bn[..., None].expand(-1, -1, features_BCF.shape[2]))
        return self.body.project(features_BnF.to(self.body.dtype))

    def begin(self, rows: list[int]) -> Tensor:
        sequences, counts = self.context.sequences, [0] * len(self.context.sequences)
        for row in rows:
            counts[row] = len(sequences[row].tokens) - 1 - self._runner.lengths[row]
        if any(counts):  # not in the first round, whose block was read with the prompt
            self._read(counts)
        self._depth = 0
        if self.transitions is not None:
            self._carried_Bnr = self._start_B1r
        return self._walked()[:, 0]

    def extend(self, level: Level) -> Tensor:
        self._before_Bn, self._depth = level.tokens_Bn, level.depth
        if self.transitions is not None:
            self._carried_Bnr = level.of_parents(self._carried_Bnr)
        return self._walked()

    def chain_logits(self, length: int) -> Tensor | None:
        return None if self.transitions is not None else self._expanded(self._logits_BKD[:, :length])

    def confidences(self) -> Tensor | None:
        return None if self.confidence is None else self._confidence_logits(self._nodes_BnX).sigmoid()

    def _walked(self) -> Tensor:
        """Return logits [B, n, V] after the nodes of the last level."""
        self._nodes_BnX = self._states_BKH[:, self._depth, None].expand(-1, self._before_Bn.shape[1], -1)
        logits_BnD = self._logits_BKD[:, self._depth, None]
        if self.transitions is None:
            return self._expanded(logits_BnD.expand(*self._before_Bn.shape, -1))
        before_Bn = self._before_Bn.to(logits_BnD.device)
        values_BnX, self._carried_Bnr = self.transitions.step(self._carried_Bnr, before_Bn, self._nodes_BnX)
        self._nodes_BnX = torch.cat([self._nodes_BnX, values_BnX], -1)
        return self._expanded(self.transitions(logits_BnD, values_BnX, walks=True))

    def _tokens(self, rows_n: Tensor) -> Tensor:
        """Return the tokens of rows of the logits."""
        return rows_n if self.body.vocabulary is None else self.body.vocabulary.tokens_D[rows_n]

    def _expanded(self, logits_BnD: Tensor) -> Tensor:
        """Return logits [B, n, V] over the target's vocabulary."""
        return logits_BnD if self.body.vocabulary is None else self.body.vocabulary.expand(logits_BnD)

    def unroll(self, signals: TeacherSignals) -> list[DraftStates]:
        """Return states of blocks at random anchors; draft position k learns the target's p at anchor + k.

        Processes that share a sequence draw the same anchors, if their random numbers are the same; each has its share.
        """
        body, ids_BT, size, part = self.body, signals.input_ids_BT, self.block_size, signals.part
        B, T = ids_BT.shape
        documents_BT = signals.documents_BT
        positions_BT = positions_like(ids_BT, documents_BT)
        anchors_BA = self._anchors(signals.mask_BT, positions_BT, part)
        features_BTF, own = signals.features_BTF, slice(None) if part is None else part.positions(T)
        assert features_BTF is not None, "the drafter's needs name layers"
        context_BCH = body.project(features_BTF[:, own].to(body.dtype))
        context = body.context_keys(context_BCH, body.rotary(context_BCH, positions_BT[:, own]))
        if part is not None:
            context = [(part.whole(keys, T), part.whole(values, T)) for keys, values in context]
        chosen_BA = anchors_BA.clamp_min(0)
        positions_BA = positions_BT.expand(B, -1).gather(1, chosen_BA)
        positions_BAb = positions_BA[..., None] + torch.arange(size, device=ids_BT.device)
        embeds_nbH = body.block(ids_BT.gather(1, chosen_BA).flatten(), size)
        embeds_BXH = embeds_nbH.view(B, -1, embeds_nbH.shape[-1])
        attend = AnchoredBlocks(context, chosen_BA, size, documents_BT, body.sees, body.sinks)
        states_BXH = body.step(embeds_BXH, None, body.rotary(embeds_BXH, positions_BAb.flatten(1)), attend)
        states_BAbH = states_BXH.unflatten(1, (-1, size))
        tokens, unrolled = None if body.vocabulary is None else body.vocabulary.tokens_D, []
        carried = None
        if self.transitions is not None:
            states_BAKH = states_BAbH[:, :, body.first :]
            last = partial(self._projected, features_BTF, (chosen_BA - 1).clamp_min(0))
            block = Block(states_BAKH, last, partial(self._best, states_BAKH), self._tokens, body.embed)
            carried = self.transitions.initial_state(block)
        for k in range(self.steps):
            towards_BA = torch.where((anchors_BA >= 0) & (anchors_BA + k + 1 < T), anchors_BA + k, -1)
            if documents_BT is not None:
                left_BA = documents_BT.gather(1, towards_BA.clamp_min(0)) != documents_BT.gather(1, chosen_BA)
                towards_BA = towards_BA.masked_fill(left_BA, -1)
            states_BAD = states_BAbH[:, :, k + body.first]
            if self.transitions is not None and carried is not None:
                before_BA = ids_BT.gather(1, towards_BA.clamp_min(0))
                values_BAX, carried = self.transitions.step(carried, before_BA, states_BAD)
                states_BAD = torch.cat([states_BAD, values_BAX], -1)
            unrolled.append(
                DraftStates.in_rows(
                    states_BAD,
                    towards_BA,
                    T,
                    self._logits_of,
                    drafting_head=partial(self._logits_of, walks=True),
                    base_head=None if self.lilicorr is None else self._base_logits,
                    vocabulary_D=tokens,
                    confidence=None if self.confidence is None else self._confidence_logits,
                    head_parameters=self._head_parameters(),
                )
            )
        return unrolled

    @torch.no_grad()
    def _best(self, states_BAKH: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return `best_tokens` of states, whose logits are not all in memory at a time."""
        parts = [best_tokens(self.body.head(part_nH), k) for part_nH in states_BAKH.flatten(0, -2).split(QUERIES)]
        log_probs_nk, rows_nk = (torch.cat(part).view(*states_BAKH.shape[:-1], k) for part in zip(*parts, strict=True))
        return log_probs_nk, rows_nk

    def _base_logits(self, states_nX: Tensor) -> Tensor:
        """Map states of an unrolled position to logits [n, D] without transitions."""
        return self.body.head(states_nX[..., : self.body.config.hidden_size])

    def _logits_of(self, states_nX: Tensor, walks: bool = False) -> Tensor:
        """Map states of an unrolled position, and values of its transitions, to logits [n, D]."""
        hidden, logits_nD = self.body.config.hidden_size, self._base_logits(states_nX)
        return logits_nD if self.transitions is None else self.transitions(logits_nD, states_nX[..., hidden:], walks)

    def _confidence_logits(self, states_nD: Tensor) -> Tensor:
        """Return the logits [n] of the confidence head; it reads states and embeddings."""
        assert self.confidence is not None
        return self.confidence(states_nD[..., : self.confidence.in_features])[..., 0]

    def _head_parameters(self) -> tuple[nn.Parameter, ...]:
        own = [] if self.confidence is None else list(self.confidence.parameters())
        own += [] if self.transitions is None else self.transitions.score_parameters()
        return (*self.body.head_parameters(), *own)

    def _anchors(self, mask_BT: Tensor, positions_BT: Tensor, part: SequencePart | None) -> Tensor:
        """Return random positions [B, A] whose next token is trained (`mask_BT`), -1 where a sequence has fewer.

        A is the largest number of a sequence, at least 1, and at most `anchors`; of these a `part` has its share.
        """
        known_BT = mask_BT & (positions_BT > 0)  # the first token of a document has no features before it
        # Not `any(0).nonzero()`: the memory estimate has no values, and takes a mask of one dimension as all marked.
        most = known_BT.sort(1, descending=True).values.any(0, keepdim=True).nonzero().shape[0]
        order_BT = torch.rand(mask_BT.shape, device=mask_BT.device).masked_fill(~known_BT, 2.0)
        best = order_BT.topk(max(1, min(self.anchors, most)), largest=False)
        anchors_BA = torch.where(best.values < 2.0, best.indices, -1)
        if part is None:
            return anchors_BA
        # No share is empty. In turns, since short sequences lack the last ones.
        missing = -anchors_BA.shape[1] % part.count
        return nn.functional.pad(anchors_BA, (0, missing), value=-1)[:, part.index :: part.count]


PARTS = (Visibility, ConvolutionOptions, MarkovOptions, SelectorOptions, LatticeOptions)
"""Options of parts of a `DFlash`, whose fields are options of its own."""


def _parts(
    options: dict[str, Any],
) -> tuple[Visibility, ConvolutionOptions, MarkovOptions, SelectorOptions, LatticeOptions]:
    """Return the options of each part; TypeError for one of none."""
    names = [{field.name for field in fields(part)} for part in PARTS]
    if unknown := options.keys() - set().union(*names):
        raise TypeError(f"unexpected options: {sorted(unknown)}")
    values = [{name: options[name] for name in options.keys() & own} for own in names]
    return tuple(part(**given) for part, given in zip(PARTS, values, strict=True))  # pyright: ignore[reportReturnType]


def best_tokens(logits_nD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities, at least in float32, and rows of the k best tokens, [n, k]."""
    best_nk, rows_nk = logits_nD.topk(k)
    exact = torch.promote_types(logits_nD.dtype, torch.float32)
    return best_nk.to(exact) - logits_nD.to(exact).logsumexp(-1, keepdim=True), rows_nk


def five_depths(target: PreTrainedModel) -> tuple[int, ...]:
    """Return five layers, evenly spaced from the second to the third to last; fewer for a shallow target."""
    depth = text_config(target).num_hidden_layers
    first, last = min(2, depth), max(depth - 2, 1)
    return tuple(sorted({round(first + i * (last - first) / 4) for i in range(5)}))
