"""The target: an unmodified transformers model behind prefill, verify and commit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from draftsmith.decode.cache import context_limit
from draftsmith.decode.reader import Reader
from draftsmith.errors import ConfigError
from draftsmith.heads.draft import ROOT, Draft
from draftsmith.heads.drafter import Text

# Shapes: B texts, N draft nodes of one text, H hidden size, V vocabulary.


class Target(Protocol):
    """What the decoder asks of a target; the exact tests also put toy tables behind it."""

    context_limit: int | None

    def prefill(self, texts: Sequence[Text], layers: tuple[int, ...] = ()) -> Tensor:
        """Begin: read all texts; the logits [B, V] behind their last tokens. `layers`: whose features are wanted."""

    def verify(self, roots: list[int], drafts: list[Draft]) -> list[Tensor]:
        """Read each text's last committed token and its draft behind it; logits [N + 1, V], the root's first."""

    def commit(self, paths: list[list[int]]) -> None:
        """Keep the roots and the accepted nodes; forget the other nodes."""

    def hidden(self, row: int, node: int) -> Tensor | None:
        """[H]: what the lm_head read behind `node` (or `ROOT`) of the last logits; None for a target without."""

    def features(self, row: int, nodes: list[int] | None = None) -> Tensor | None:
        """[n, F]: the wanted features of all tokens just read, or of the root and these nodes of a draft."""

    def drop(self, rows: list[int]) -> None:
        """Some texts are finished: keep these rows."""


@dataclass
class RootedTree:
    """A draft below its root, which is node 0 here because the target has not read it yet."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]

    @classmethod
    def of(cls, root: int, draft: Draft) -> "RootedTree":
        return cls([root, *draft.tokens], [ROOT, *(p + 1 for p in draft.parents)], [1, *(d + 1 for d in draft.depths)])


class TransformersTarget:
    """A transformers causal LM or encoder-decoder model with a pointer cache."""

    def __init__(self, model: nn.Module) -> None:
        if model.get_output_embeddings() is None:
            raise ConfigError(f"model {type(model).__name__} has no lm_head; expected a causal language model")
        self.model = model
        self.context_limit = context_limit(model)
        self.widths: dict[int, int] = {}
        """Tokens of a verification to the number that it is padded to, where that is cheaper."""

    def prefill(self, texts: Sequence[Text], layers: tuple[int, ...] = ()) -> Tensor:
        sources = [text.source for text in texts]
        encoded = [text.encoded for text in texts if text.encoded is not None] or None
        watched = {"remember": True, "layers": layers}
        self._reader = Reader(self.model, len(texts), sources, widths=self.widths, encoded=encoded, **watched)
        return self._reader.append([text.tokens for text in texts])

    def verify(self, roots: list[int], drafts: list[Draft]) -> list[Tensor]:
        trees = [RootedTree.of(root, draft) for root, draft in zip(roots, drafts, strict=True)]
        return self._reader.branch(trees, [list(range(len(tree.tokens))) for tree in trees])

    def commit(self, paths: list[list[int]]) -> None:
        self._reader.commit([[0, *(node + 1 for node in path)] for path in paths])

    def hidden(self, row: int, node: int) -> Tensor | None:
        return self._reader.states[row][node + 1]

    def features(self, row: int, nodes: list[int] | None = None) -> Tensor | None:
        if not self._reader.features:
            return None
        features_nF = self._reader.features[row]
        return features_nF if nodes is None else features_nF[[0, *(node + 1 for node in nodes)]]

    def drop(self, rows: list[int]) -> None:
        self._reader.drop(rows)
