"""Compiled passes: their shapes are fixed, so `torch.compile` builds each once, and CUDA records it as a graph.

    tokens    [rows, width]                    padded to a few widths; rows whose texts have ended stay
    storage   [rows, heads, slots, head size]  allocated for the longest text, and used again by later calls
    mask      [rows, 1, width, slots]          every pass reads all slots

The slot of a token is a value of a tensor, so the length of a text and the number of unfinished texts change no shape.
Prompts, and passes that are wider than `MOST_WIDTH`, are not compiled; they use the same storage.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel

from draftsmith.decode.kv_cache import RollbackCache
from draftsmith.decode.masks import Attention
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.hidden_states import Watched
from draftsmith.heads.model_config import context_limit

FEWEST_SLOTS, MOST_WIDTH = 128, 128
RECORDING = 3
"""Runs of a new graph on CUDA: one chooses kernels, one records, one replays."""
OPTIONS: dict[str, dict[str, Any]] = {"cuda": {"mode": "reduce-overhead"}}
"""Arguments of torch.compile by type of device."""
HEAD = 0
"""Key of the lm_head's input among the tensors that hooks keep; layers are counted from 1."""

# Shapes: B rows, Q tokens fed to each, S slots of the cache, F size of the features of a token.


class PassInputs(NamedTuple):
    """The tensors that a pass reads besides its cache."""

    ids_BQ: Tensor
    starts_B: Tensor
    """Slots in use before the pass."""
    positions_BQ: Tensor | None = None
    """None: the slot of each token."""
    visible_BQS: Tensor | None = None
    """bool; the slots that each token attends to; None: all up to its own."""
    positions_BS: Tensor | None = None
    """The position of the token in each slot; None: the slot. Read by sliding windows only."""
    features_BQF: Tensor | None = None

    def filled(self, rows: int) -> "PassInputs":
        """Return the inputs with rows of texts that have ended, which attend to something, after the others."""
        missing = rows - len(self.ids_BQ)
        return self if missing == 0 else PassInputs._make(_filled(x, missing) for x in self)


def _filled(x: Tensor | None, rows: int) -> Tensor | None:
    return None if x is None else torch.cat([x, x.new_ones(rows, *x.shape[1:])])


class PassOutput(NamedTuple):
    """Output of a pass for every token; states and features where they are asked for."""

    logits_BQV: Tensor
    states_BQH: Tensor | None
    features_BQF: Tensor | None

    def part(self, rows: int, width: int) -> "PassOutput":
        """Return the output of the first rows and tokens."""
        return PassOutput._make(None if x is None else x[:rows, :width] for x in self)


class CompiledPasses:
    """The compiled passes of one model over `rows` texts, and the cache that they share.

    Args:
        slots: of the cache for each text; a text has fewer tokens, and padding is written to the last slot.
    """

    def __init__(self, model: PreTrainedModel, rows: int, slots: int) -> None:
        parameter = next(model.parameters())
        self.rows, self.slots, self._device, self._dtype = rows, slots, parameter.device, parameter.dtype
        self.cache = RollbackCache(model.config, rows, slots, fixed=True)
        self.attention = Attention.of(model)
        self._last_position = min(slots, context_limit(model.config) or slots) - 1
        self.seen: dict[int, Tensor] = {}
        self._hooks: dict[int, Callable] = {}
        self._graphs: dict[tuple, Callable[..., PassOutput]] = {}

    def fits(self, model: PreTrainedModel, rows: int, slots: int) -> bool:
        parameter = next(model.parameters())
        wanted = (rows, slots, parameter.device, parameter.dtype)
        return (self.rows, self.slots, self._device, self._dtype) == wanted

    @contextmanager
    def watching(self, modules: dict[int, Watched]) -> Iterator[None]:
        """Keep the lm_head's input and the layers' outputs of a pass in `seen`.

        Args:
            modules: the lm_head, as `HEAD`, and layers by number.
        """
        handles = []
        for layer, watched in modules.items():
            if layer not in self._hooks:  # the same function in every pass, or torch would compile the pass again
                self._hooks[layer] = watched.hook(self.seen, layer)
            handles.append(watched.place(self._hooks[layer]))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def run(
        self, model: PreTrainedModel, inputs: PassInputs, modules: dict[int, Watched], layers: tuple[int, ...]
    ) -> PassOutput:
        """Read tokens after those in the cache and return the output, which later passes do not overwrite.

        Args:
            modules: see `watching`; without the lm_head, states are the `states` of the model's output.
            layers: whose outputs are the features, in this order.

        Raises:
            ConfigError: if torch cannot compile the model.
        """
        count, width = inputs.ids_BQ.shape
        key = (width, tuple(x is None for x in inputs), HEAD in modules, layers)
        graph, runs, output = self._graphs.get(key), 1, None
        if graph is None:
            graph = self._graphs[key] = _graph(f"pass_of_{width}", self._device)
            runs = RECORDING if self._device.type == "cuda" else 1
        inputs = inputs.filled(self.rows)
        with self.watching(modules), self.attention.running(chain=False):
            try:
                for _ in range(runs):
                    torch.compiler.cudagraph_mark_step_begin()
                    output = graph(self, model, inputs, HEAD in modules, layers)
            except TorchDynamoException as error:
                raise ConfigError(
                    f"compile=True: torch.compile fails for {type(model).__name__} ({reason_of(error)}); "
                    "expected compile=False"
                ) from error
        assert output is not None
        if self._device.type == "cuda":  # the next replay of the graph writes to the same memory
            output = PassOutput._make(None if x is None else x.clone() for x in output)
        return output.part(count, width)

    def _pass(self, model: PreTrainedModel, inputs: PassInputs, remember: bool, layers: tuple[int, ...]) -> PassOutput:
        """Run the model; this is the function that is compiled."""
        ids_BQ, device = inputs.ids_BQ, inputs.ids_BQ.device
        steps_Q, slot_S = (torch.arange(count, device=device) for count in (ids_BQ.shape[1], self.slots))
        slots_BQ = (inputs.starts_B[:, None] + steps_Q).clamp(max=self.slots - 1)
        positions_BQ = slots_BQ.clamp(max=self._last_position) if inputs.positions_BQ is None else inputs.positions_BQ
        visible_BQS = slot_S <= slots_BQ[:, :, None] if inputs.visible_BQS is None else inputs.visible_BQS
        positions_BS = slot_S[None] if inputs.positions_BS is None else inputs.positions_BS
        place = self.cache.place
        place.start, place.end, place.slots_BQ = None, self.slots, slots_BQ
        arguments = {"input_ids": ids_BQ, "position_ids": positions_BQ, "past_key_values": self.cache}
        if inputs.features_BQF is not None:
            arguments["features"] = inputs.features_BQF
        mask = self.attention.prepared(visible_BQS, positions_BQ, positions_BS, self._dtype)
        output = model(**arguments, attention_mask=mask, use_cache=True)
        place.slots_BQ = None
        states = self.seen[HEAD] if remember else getattr(output, "states", None)
        features = torch.cat([self.seen[layer] for layer in layers], -1) if layers else None
        self.seen.clear()  # a graph's outputs must not be kept by accident
        return PassOutput(output.logits, states, features)


def _graph(name: str, device: torch.device) -> Callable[..., PassOutput]:
    """Return `CompiledPasses._pass`, which is compiled when it is first called.

    It has code of its own: torch limits the number of graphs for one code object, and looks through all of them.
    """
    global _BUILT
    _BUILT += 1
    plain = CompiledPasses._pass
    own = FunctionType(plain.__code__.replace(co_name=name), plain.__globals__, name, plain.__defaults__)
    return torch.compile(own, fullgraph=True, dynamic=False, **OPTIONS.get(device.type, {}))


_BUILT = 0
_FREE: "WeakKeyDictionary[nn.Module, list[CompiledPasses]]" = WeakKeyDictionary()
"""Passes that no text uses; graphs and storage stay for the next call."""


def take_passes(model: PreTrainedModel, rows: int, longest: int) -> CompiledPasses:
    """Return passes over `rows` texts of at most `longest` tokens; ones that were given back, where there are any."""
    slots = max(FEWEST_SLOTS, 1 << longest.bit_length())  # a power of two above `longest`
    free = _FREE.setdefault(model, [])
    passes = next((passes for passes in free if passes.fits(model, rows, slots)), None)
    if passes is None:
        return CompiledPasses(model, rows, slots)
    free.remove(passes)
    passes.cache.clear(rows)
    return passes


def give_back(model: PreTrainedModel, passes: CompiledPasses) -> None:
    """Make passes available to later texts."""
    _FREE.setdefault(model, []).append(passes)


def built_graphs() -> int:
    """Return the number of graphs that have been built."""
    return _BUILT
