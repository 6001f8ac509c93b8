"""Compiled passes: their shapes are fixed, so `torch.compile` builds each once, and CUDA records it as a graph.

    tokens    [rows, width]                    padded to a few widths; rows whose sequences have ended remain
    storage   [rows, heads, slots, head size]  allocated for the longest sequence, and used again by later calls
    mask      [rows, 1, width, slots]          every pass reads all slots

The slot of a token is a value of a tensor, so no shape changes with the length or the number of unfinished sequences.
Prompts, and passes that are wider than `MOST_WIDTH`, are not compiled; they use the same storage.

Before a graph runs, torch compares the model with what it was when the graph was built, which takes up to 15 % of a
pass on a CPU. This happens once in each call of the decoder: no model may change its modules while it decodes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from threading import Lock
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel

from draftsmith.decode.cache.rollback import RollbackCache, cache_name
from draftsmith.decode.passes.attention import Attention
from draftsmith.decode.passes.eager import EagerPasses
from draftsmith.decode.passes.plan import HEAD, Output, Plan, Reading, Seen
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.hidden_states import Watched
from draftsmith.heads.model_config import STANCE, QueryScales, context_limit

FEWEST_SLOTS, MOST_WIDTH = 128, 128
RECORDING = 3
"""Runs of a new graph on CUDA: one chooses kernels, one records, one replays."""
OPTIONS: dict[str, dict[str, Any]] = {"cuda": {"mode": "reduce-overhead"}}
"""Arguments of torch.compile by type of device."""

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
    shift_B1: Tensor | None = None
    """Position minus slot of the tokens after a prompt with images; None: 0."""


def _filled(inputs: PassInputs, rows: int) -> PassInputs:
    """Return the inputs with rows of sequences that have ended, which attend to something, after the others."""
    missing = rows - len(inputs.ids_BQ)
    if missing == 0:
        return inputs
    return inputs._make(None if x is None else torch.cat([x, x.new_ones(missing, *x.shape[1:])]) for x in inputs)


class PassGraphs:
    """The compiled passes of one model over `rows` sequences, and the cache that they share.

    Args:
        slots: of the cache for each sequence; a sequence has fewer tokens, and padding is written to the last slot.
    """

    def __init__(self, model: PreTrainedModel, rows: int, slots: int) -> None:
        parameter = next(model.parameters())
        self.rows, self.slots, self._device, self._dtype = rows, slots, parameter.device, parameter.dtype
        self.form = (rows, slots, parameter.device, parameter.dtype)
        self.cache = RollbackCache(model.config, rows, parameter.device, slots, fixed=True)
        self.attention, self.scales = Attention.of(model), QueryScales(model)
        accepted = signature(model.forward).parameters
        self._cache_name, self._takes_positions = cache_name(accepted), "position_ids" in accepted
        self._last_position = min(slots, context_limit(model.config) or slots) - 1
        self.seen: dict[int, Tensor] = {}
        self._hooks: dict[int, Callable] = {}
        self._graphs: dict[tuple, Graph] = {}

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
            handles.append(watched.register(self._hooks[layer]))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def run(
        self,
        model: PreTrainedModel,
        inputs: PassInputs,
        modules: dict[int, Watched],
        layers: tuple[int, ...],
    ) -> Output:
        """Read tokens after those in the cache and return the output, which later passes do not overwrite.

        Args:
            modules: see `watching`; without the lm_head, states are the `states` of the model's output.
            layers: whose outputs are the features, in this order.

        Raises:
            ConfigError: if torch cannot compile the model.
        """
        count, width = inputs.ids_BQ.shape
        key = (width, tuple(x is None for x in inputs), HEAD in modules, layers)
        if key not in self._graphs:
            self._graphs[key] = Graph(PassGraphs._pass, f"pass_of_{width}", self._device)
        inputs = _filled(inputs, self.rows)
        with self.watching(modules), self.attention.running(chain=False), self.scales.reading():
            output = self._graphs[key].run(model, self, model, inputs, HEAD in modules, layers)
        return Output._make(output).part(count, width)

    def _pass(self, model: PreTrainedModel, inputs: PassInputs, remember: bool, layers: tuple[int, ...]) -> Output:
        """Run the model; this is the function that is compiled."""
        ids_BQ, device = inputs.ids_BQ, inputs.ids_BQ.device
        steps_Q, slot_S = (torch.arange(count, device=device) for count in (ids_BQ.shape[1], self.slots))
        slots_BQ = (inputs.starts_B[:, None] + steps_Q).clamp(max=self.slots - 1)
        positions_BQ = slots_BQ.clamp(max=self._last_position) if inputs.positions_BQ is None else inputs.positions_BQ
        visible_BQS = slot_S <= slots_BQ[:, :, None] if inputs.visible_BQS is None else inputs.visible_BQS
        positions_BS = slot_S[None] if inputs.positions_BS is None else inputs.positions_BS
        place = self.cache.place
        place.row, place.start, place.end, place.slots_BQ = None, None, self.slots, slots_BQ
        arguments: dict[str, Any] = {"input_ids": ids_BQ, self._cache_name: self.cache}
        shifted_BQ = positions_BQ if inputs.shift_B1 is None else positions_BQ + inputs.shift_B1
        if self._takes_positions:
            arguments["position_ids"] = shifted_BQ
        if self.scales:
            self.scales.positions_BQ = shifted_BQ
        if inputs.features_BQF is not None:
            arguments["features"] = inputs.features_BQF
        mask = self.attention.prepared(visible_BQS, positions_BQ, positions_BS, self._dtype)
        output = model(**arguments, attention_mask=mask, use_cache=True)
        place.slots_BQ = self.scales.positions_BQ = None
        states = self.seen[HEAD] if remember else getattr(output, "states", None)
        features = torch.cat([self.seen[layer] for layer in layers], -1) if layers else None
        self.seen.clear()  # a graph's outputs must not be kept by accident
        return Output(output.logits, states, features)


class Graph:
    """A function that is compiled when it first runs; it is called with tensors of one shape.

    It has code of its own: torch limits the number of graphs for one code object, and looks through all of them.
    """

    def __init__(self, plain: FunctionType, name: str, device: torch.device) -> None:
        global _BUILT
        _BUILT += 1
        own = FunctionType(plain.__code__.replace(co_name=name), plain.__globals__, name, plain.__defaults__)
        self._run = torch.compile(own, fullgraph=True, dynamic=False, **OPTIONS.get(device.type, {}))
        self._on_cuda = device.type == "cuda"
        self._runs = RECORDING if self._on_cuda else 1
        self._checked = 0

    def run(self, module: nn.Module, *arguments: Any) -> list[Tensor | None]:
        """Return the output, which later runs do not overwrite.

        Raises:
            ConfigError: if torch cannot compile the function, of which `module` is the part that it may not trace.
        """
        output: Sequence[Tensor | None] = ()
        try:
            for _ in range(self._runs):
                torch.compiler.cudagraph_mark_step_begin()
                output = self._run_checked(*arguments)
        except TorchDynamoException as error:
            raise ConfigError(
                f"compile=True: torch.compile fails for {type(module).__name__} ({reason_of(error)}); "
                "expected compile=False"
            ) from error
        self._runs = 1
        # On CUDA, the next replay of the graph writes to the same memory.
        return [x.clone() if x is not None and self._on_cuda else x for x in output]

    def _run_checked(self, *arguments: Any) -> Sequence[Tensor | None]:
        """Run the graph, which is compared with the model if it has not been since `take_graphs` was last called."""
        if self._checked != _TAKEN:
            output = self._run(*arguments)
            self._checked = _TAKEN
            return output
        with STANCE, torch.compiler.set_stance(skip_guard_eval_unsafe=True):
            return self._run(*arguments)


def in_one_layout(x: Tensor) -> Tensor:
    """Return a copy of `x` whose strides follow from its shape: a graph is compiled for one layout."""
    return x.clone(memory_format=torch.contiguous_format)  # `contiguous` keeps the strides of a batch of one sequence


_BUILT = _TAKEN = 0
"""Graphs that have been built, and calls of `take_graphs`."""
_FREE: "WeakKeyDictionary[nn.Module, list[PassGraphs]]" = WeakKeyDictionary()
"""Unused passes, with their graphs and storage, for later calls."""
_FREE_LOCK = Lock()


def take_graphs(model: PreTrainedModel, rows: int, longest: int) -> PassGraphs:
    """Return passes over `rows` sequences of at most `longest` tokens; returned ones are used again."""
    global _TAKEN
    slots = max(FEWEST_SLOTS, 1 << longest.bit_length())  # a power of two above `longest`
    with _FREE_LOCK:
        _TAKEN += 1
        free = _FREE.setdefault(model, [])
        parameter = next(model.parameters())
        form = (rows, slots, parameter.device, parameter.dtype)
        passes = next((passes for passes in free if passes.form == form), None)
        if passes is not None:
            free.remove(passes)
    if passes is None:
        return PassGraphs(model, rows, slots)
    passes.cache.clear(rows)
    return passes


def give_back(model: PreTrainedModel, graphs: PassGraphs) -> None:
    """Make passes available to later calls."""
    with _FREE_LOCK:
        _FREE.setdefault(model, []).append(graphs)


def built_graphs() -> int:
    """Return the number of graphs that have been built."""
    return _BUILT


class CompiledPasses(EagerPasses):
    """Compiled passes of a model, and eager ones over its prompts and over more than `MOST_WIDTH` tokens.

    Args:
        plan: `longest` determines the storage, which is allocated at once.
    """

    def __init__(self, model: PreTrainedModel, rows: int, plan: Plan) -> None:
        assert plan.longest is not None, "the storage of compiled passes is allocated at once"
        self._graphs, self._usual = take_graphs(model, rows, plan.longest), plan.width
        seen = Seen(model, plan, self._graphs.watching, self._graphs.seen)
        super().__init__(model, plan, self._graphs.cache, seen)

    def padded(self, count: int) -> int:
        if max(self.cache.lengths) == 0:  # not compiled
            return count
        if count <= self._usual:
            return self._usual
        power = 1 << (count - 1).bit_length()
        return power if power <= MOST_WIDTH else count

    def _compiles(self, width: int) -> bool:
        """Return whether a pass of this width is compiled: after the prompt, whose pass allocates the cache."""
        is_narrow = width <= MOST_WIDTH or width == self._usual
        return is_narrow and self.cache.is_allocated and max(self.cache.lengths) > 0

    def read(self, reading: Reading) -> Output:
        return self._compiled(reading).of(reading) if self._compiles(reading.width) else super().read(reading)

    def _compiled(self, reading: Reading) -> Output:
        """Run a compiled pass."""
        positions_BQ = visible_BQS = positions_BS = None
        if reading.visible_BQR is not None:  # else the pass counts its positions itself
            positions_BQ, visible_BQS = reading.positions(self.last_position), self.visible(reading)
            assert visible_BQS is not None
            visible_BQS = nn.functional.pad(visible_BQS, (0, self._graphs.slots - visible_BQS.shape[2]))
            visible_BQS = visible_BQS.expand(len(reading.starts), -1, -1)
            if self._graphs.attention.window is not None:
                positions_BS = reading.slot_positions(self._graphs.slots)
        inputs = PassInputs(
            in_one_layout(reading.ids_BQ),
            reading.starts.on_device_B,
            positions_BQ,
            visible_BQS,
            positions_BS,
            None if reading.features_BQF is None else in_one_layout(reading.features_BQF),
            self.shift_B1,
        )
        return self._graphs.run(self.model, inputs, self._seen.modules, self._seen.layers)

    def block_columns(self, size: int) -> int | None:
        return self._usual - size if self._compiles(self._usual) else None

    def close(self) -> None:
        """Make the graphs and their storage available to later calls."""
        give_back(self.model, self._graphs)
