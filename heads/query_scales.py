"""The attention temperature of Llama 4 at the positions of a pass.

Its layers without rotation multiply the query at position t by 1 + attn_scale * log(1 + floor((t + 1) / floor_scale)).
transformers counts t from the number of tokens in the cache, whatever positions a pass is given. That is another number
where rows differ in length, at the nodes of a tree, in compiled passes, and in rows with several texts.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.heads.model_config import NO_CONTEXT, text_config

# Shapes: B rows, Q positions, D size of all query heads.


class QueryScales:
    """The layers of a model that scale their queries by position; none for models other than Llama 4."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers = self._layers_of(model)
        self._hooks = [self._hook(layer) for layer in self._layers]
        """The same functions in every pass, or torch would compile the pass again."""
        self.positions_BQ: Tensor | None = None
        """The positions of the pass, set before the layers run."""

    @staticmethod
    def _layers_of(model: PreTrainedModel) -> list[Any]:
        if not getattr(text_config(model), "attn_temperature_tuning", False):
            return []
        return [part for part in model.modules() if not getattr(part, "use_rope", True)]

    def __bool__(self) -> bool:
        return bool(self._layers)

    def reading(self, positions_BQ: Tensor | None = None) -> AbstractContextManager[None]:
        """Let the layers scale their queries by these positions, or by those that `positions_BQ` is set to later."""
        return self._reading(positions_BQ) if self._layers else NO_CONTEXT

    @contextmanager
    def _reading(self, positions_BQ: Tensor | None) -> Iterator[None]:
        handles = []
        try:
            self.positions_BQ = positions_BQ
            for layer, hook in zip(self._layers, self._hooks, strict=True):
                handles.append(layer.q_proj.register_forward_hook(hook))
                layer.attn_temperature_tuning = False
            yield
        finally:
            for layer in self._layers:
                layer.attn_temperature_tuning = True
            for handle in handles:
                handle.remove()
            self.positions_BQ = None

    def _hook(self, layer: Any) -> Any:
        def scaled(_: nn.Module, __: tuple, queries_BQD: Tensor) -> Tensor:
            assert self.positions_BQ is not None
            steps_BQ = torch.floor((self.positions_BQ.float() + 1.0) / layer.floor_scale)
            scales_BQ = torch.log1p(steps_BQ) * layer.attn_scale + 1.0
            return (queries_BQD * scales_BQ[..., None]).to(queries_BQD.dtype)

        return scaled
