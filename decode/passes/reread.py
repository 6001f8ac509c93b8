"""Passes of a model whose cache cannot discard draft tokens: it reads committed tokens again, with the next draft.

    own cache of the model | committed since, read again | draft ......... |

Each pass continues a copy of the model's own cache, which is moved on after `MOST_AGAIN` tokens. A model without a
cache, or one that continues its cache by one token at a time only, reads the whole text in each pass instead.
"""

from copy import deepcopy
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.decode.cache.recurrent import MOST_AGAIN
from draftsmith.decode.cache.rollback import RollbackCache
from draftsmith.decode.passes.attention import passes_of
from draftsmith.decode.passes.base import Output, Plan, Reading
from draftsmith.decode.passes.eager import EagerPasses

# Shapes: Q new tokens, S tokens of the text so far.


class RereadingPasses(EagerPasses):
    """One text and, where the model is run with passes "copied", its own cache of the first tokens."""

    rewinds = False

    def __init__(self, model: PreTrainedModel, plan: Plan, cache: RollbackCache) -> None:
        super().__init__(model, plan, cache)
        assert len(cache.lengths) == 1, "`Capability` has such texts decoded one after another"
        self._widths = {}  # padding would be read again, too
        self._copies = passes_of(model) == "copied"
        self._own_cache: Any = None
        self._cached = 0
        self._ids_1S = torch.empty(1, 0, dtype=torch.long, device=self._device)

    def _run(self, inputs: dict[str, Any], reading: Reading) -> Output:
        """Return the model's output for new tokens after the first ones; its last columns are theirs."""
        if self._takes_keep:
            inputs["logits_to_keep"] = reading.width
        self._ids_1S = torch.cat([self._ids_1S[:, : reading.starts[0]], reading.ids_BQ], 1)
        length = self.cache.lengths[0]
        if self._copies and length - self._cached >= MOST_AGAIN:
            self._continue(inputs, length, moves=True)
        output = self._continue(inputs, self._ids_1S.shape[1], moves=reading.counts is not None)
        return self._output(output, reading, last=reading.width)

    def _continue(self, inputs: dict[str, Any], end: int, *, moves: bool) -> Any:
        """Read the tokens between the cache and `end`; with `moves` they are in the cache from now on."""
        name = self._cache_name
        own = {key: value for key, value in inputs.items() if key != name}
        own |= {"input_ids": self._ids_1S[:, self._cached : end], "use_cache": self._copies}
        if self._copies:
            own[name] = self._own_cache if moves else deepcopy(self._own_cache)
        if "position_ids" in inputs:
            own["position_ids"] = torch.arange(self._cached, end, device=self._device)[None]
        output = self.model(**own)
        if moves and self._copies:
            self._own_cache, self._cached = output[name], end
        return output
