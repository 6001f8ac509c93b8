"""Compiled passes: their shapes are fixed, so `torch.compile` builds each once, and CUDA records it as a graph.

    tokens    [rows, width]                    padded to a few widths; rows whose texts have ended stay
    storage   [rows, heads, slots, head size]  allocated for the longest text, and used again by later calls
    mask      [rows, 1, width, slots]          every pass reads all slots

The slot of a token is a value of a tensor, so the length of a text and the number of unfinished texts change no shape.
Prompts, and passes that are wider than `MOST_WIDTH`, are not compiled; they use the same storage. Heads without a cache
are compiled for the same rows, see `run_step`. A chain of draft tokens is one graph, see `PassGraphs.chain`.

Before a graph runs, torch compares the model with what it was when the graph was built, which takes up to 15 % of a
pass on a CPU. This happens once in each call of the decoder: no model may change its modules while it decodes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from threading import Lock, current_thread
from types import FunctionType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel

from draftsmith.decode.cache.fixed import MOST_KEPT, FixedStates
from draftsmith.decode.cache.rollback import RollbackCache, cache_name
from draftsmith.decode.passes.base import HEAD, Output
from draftsmith.decode.passes.masks import Attention
from draftsmith.decode.sampling import index_at, precise
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.hidden_states import Watched
from draftsmith.heads.model_config import STANCE, QueryScales, context_limit

FEWEST_SLOTS, MOST_WIDTH = 128, 128
RECORDING = 3
"""Runs of a new graph on CUDA: one chooses kernels, one records, one replays."""
OPTIONS: dict[str, dict[str, Any]] = {"cuda": {"mode": "reduce-overhead"}}
"""Arguments of torch.compile by type of device."""

# Shapes: B rows, Q tokens fed to each, S slots of the cache, F size of the features of a token, D draft tokens,
# V vocabulary.


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
    again_B: Tensor | None = None
    """Columns before those of the pass in recurrent layers, see `FixedStates.aim`."""
    shift_B1: Tensor | None = None
    """Position minus slot of the tokens after a prompt with images; None: 0."""


class ChainInputs(NamedTuple):
    """The tensors that a chain of D draft tokens is made from, besides the cache."""

    logits_BV: Tensor
    """For the first token."""
    starts_B: Tensor
    """Slots in use before the chain."""
    features_BF: Tensor | None = None
    """Input of the pass over the first token; later passes read the `states` of the one before."""
    temperature_B1: Tensor | None = None
    uniform_BD: Tensor | None = None
    """Uniform numbers with which the tokens are drawn; None: the likeliest ones are chosen."""
    again_B: Tensor | None = None
    """Of the first pass."""


Inputs = TypeVar("Inputs", PassInputs, ChainInputs)


def _filled(inputs: Inputs, rows: int) -> Inputs:
    """Return the inputs with rows of texts that have ended, which attend to something, after the others."""
    missing = rows - len(inputs[0])
    if missing == 0:
        return inputs
    return inputs._make(None if x is None else torch.cat([x, x.new_ones(missing, *x.shape[1:])]) for x in inputs)


class PassGraphs:
    """The compiled passes of one model over `rows` texts, and the cache that they share.

    Args:
        slots: of the cache for each text; a text has fewer tokens, and padding is written to the last slot.
    """

    def __init__(self, model: PreTrainedModel, rows: int, slots: int) -> None:
        parameter = next(model.parameters())
        self.rows, self.slots, self._device, self._dtype = rows, slots, parameter.device, parameter.dtype
        self.cache = RollbackCache(model.config, rows, parameter.device, slots, fixed=True)
        self.states = FixedStates(model, self.cache, rows, MOST_WIDTH)
        self.attention, self.scales = Attention.of(model), QueryScales(model)
        accepted = signature(model.forward).parameters
        self._cache_name, self._takes_positions = cache_name(accepted), "position_ids" in accepted
        self._last_position = min(slots, context_limit(model.config) or slots) - 1
        self.seen: dict[int, Tensor] = {}
        self._hooks: dict[int, Callable] = {}
        self._graphs: dict[tuple, Graph] = {}

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
        self,
        model: PreTrainedModel,
        inputs: PassInputs,
        modules: dict[int, Watched],
        layers: tuple[int, ...],
        most_again: int = 0,
    ) -> Output:
        """Read tokens after those in the cache and return the output, which later passes do not overwrite.

        Args:
            modules: see `watching`; without the lm_head, states are the `states` of the model's output.
            layers: whose outputs are the features, in this order.
            most_again: see `FixedStates.aim`.

        Raises:
            ConfigError: if torch cannot compile the model.
        """
        count, width = inputs.ids_BQ.shape
        key = (width, tuple(x is None for x in inputs), HEAD in modules, layers, most_again)
        if key not in self._graphs:
            replaced = self.states.saved if inputs.again_B is None else list
            self._graphs[key] = Graph(PassGraphs._pass, f"pass_of_{width}", self._device, replaced)
        inputs = _filled(inputs, self.rows)
        with self.watching(modules), self.attention.running(chain=False), self.scales.reading():
            output = self._graphs[key].run(model, self, model, inputs, HEAD in modules, layers, most_again)
        return Output._make(output).part(count, width)

    def _pass(
        self, model: PreTrainedModel, inputs: PassInputs, remember: bool, layers: tuple[int, ...], most_again: int
    ) -> Output:
        """Run the model; this is the function that is compiled."""
        ids_BQ, device = inputs.ids_BQ, inputs.ids_BQ.device
        steps_Q, slot_S = (torch.arange(count, device=device) for count in (ids_BQ.shape[1], self.slots))
        slots_BQ = (inputs.starts_B[:, None] + steps_Q).clamp(max=self.slots - 1)
        positions_BQ = slots_BQ.clamp(max=self._last_position) if inputs.positions_BQ is None else inputs.positions_BQ
        visible_BQS = slot_S <= slots_BQ[:, :, None] if inputs.visible_BQS is None else inputs.visible_BQS
        positions_BS = slot_S[None] if inputs.positions_BS is None else inputs.positions_BS
        place = self.cache.place
        place.row, place.start, place.end, place.slots_BQ = None, None, self.slots, slots_BQ
        self.states.aim(inputs.again_B, most_again, ids_BQ.shape[1])
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
        self.states.aim(None, 0, 0)
        states = self.seen[HEAD] if remember else getattr(output, "states", None)
        features = torch.cat([self.seen[layer] for layer in layers], -1) if layers else None
        self.seen.clear()  # a graph's outputs must not be kept by accident
        return Output(output.logits, states, features)

    def chain(self, model: PreTrainedModel, inputs: ChainInputs, length: int) -> tuple[Tensor, list[Tensor]]:
        """Return `length` draft tokens [B, D] and, where they are drawn, the distributions [B, V] of each.

        One graph reads all tokens but the last, so that nothing runs on the host between them.

        Raises:
            ConfigError: if torch cannot compile the model.
        """
        count, key = len(inputs.logits_BV), ("chain", length, tuple(x is None for x in inputs))
        if key not in self._graphs:
            self._graphs[key] = Graph(PassGraphs._chain, f"chain_of_{length}", self._device)
        inputs = ChainInputs._make(None if x is None else in_one_layout(x) for x in inputs)
        with self.attention.running(chain=False), self.scales.reading():
            output = self._graphs[key].run(model, self, model, _filled(inputs, self.rows), length)
        tokens_BD, *q = (x[:count] for x in output if x is not None)
        return tokens_BD, q

    def _chain(self, model: PreTrainedModel, inputs: ChainInputs, length: int) -> list[Tensor]:
        """Build the chain; this is the function that is compiled."""
        logits_BV, features_BF = inputs.logits_BV, inputs.features_BF
        tokens: list[Tensor] = []
        q: list[Tensor] = []
        for place in range(length):
            if place > 0:
                features_B1F = None if features_BF is None else features_BF[:, None]
                again_B = None if inputs.again_B is None else inputs.again_B + place - 1
                starts_B = inputs.starts_B + place - 1
                last = PassInputs(tokens[-1][:, None], starts_B, features_BQF=features_B1F, again_B=again_B)
                output = self._pass(model, last, False, (), MOST_KEPT + place - 1)
                logits_BV = output.logits_BQV[:, 0]
                features_BF = None if output.states_BQH is None else output.states_BQH[:, 0]
            scores_BV = precise(logits_BV)
            if inputs.uniform_BD is None:
                tokens.append(scores_BV.argmax(-1))
                continue
            assert inputs.temperature_B1 is not None
            q.append((scores_BV / inputs.temperature_B1).softmax(-1))
            drawn_B = index_at(q[-1], inputs.uniform_BD[:, place : place + 1])[:, 0]
            tokens.append(drawn_B.clamp(max=logits_BV.shape[1] - 1))  # of a row that is filled
        return [torch.stack(tokens, 1), *q]

    def advance(self, model: PreTrainedModel, full_B: Tensor) -> None:
        """Move inputs of recurrent layers into their saved states, see `FixedStates.advance`.

        Raises:
            ConfigError: if torch cannot compile the layers.
        """
        key = ("advance",)
        if key not in self._graphs:
            self._graphs[key] = Graph(FixedStates.advance, "advance", self._device, self.states.tensors)
        others_B = full_B.new_zeros(self.rows - len(full_B))
        self._graphs[key].run(model, self.states, torch.cat([full_B, others_B]))


class Graph:
    """A function that is compiled when it first runs; it is called with tensors of one shape.

    It has code of its own: torch limits the number of graphs for one code object, and looks through all of them.

    Args:
        replaced: returns the tensors that the function reads and then replaces, so that a second run would continue
            from the first; the runs that record a graph put their values back.
    """

    def __init__(
        self, plain: FunctionType, name: str, device: torch.device, replaced: Callable[[], list[Tensor]] = list
    ) -> None:
        global _BUILT
        _BUILT += 1
        own = FunctionType(plain.__code__.replace(co_name=name), plain.__globals__, name, plain.__defaults__)
        self._run = torch.compile(own, fullgraph=True, dynamic=False, **OPTIONS.get(device.type, {}))
        self._on_cuda = device.type == "cuda"
        self._runs, self._replaced = RECORDING if self._on_cuda else 1, replaced
        self._checked = 0

    def run(self, module: nn.Module, *arguments: Any) -> list[Tensor | None]:
        """Return the output, which later runs do not overwrite.

        Raises:
            ConfigError: if torch cannot compile the function, of which `module` is the part that it may not trace.
        """
        output: Sequence[Tensor | None] = ()
        before = [(x, x.clone()) for x in self._replaced()] if self._runs > 1 else []
        try:
            for number in range(self._runs):
                for x, old in before if number else ():
                    x.copy_(old)
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
    return x.clone(memory_format=torch.contiguous_format)  # `contiguous` would keep the strides of a batch of one text


def run_step(module: nn.Module, rows: int, *inputs: Tensor | int) -> tuple[Tensor, ...]:
    """Return `module(*inputs)`, compiled for `rows` texts and n nodes of each, padded to a power of two.

    Tensors, the first input among them, are [B, n, ...] like the output.
    """
    first = inputs[0]
    assert isinstance(first, Tensor)
    count, n = first.shape[:2]
    width = 1 << (n - 1).bit_length()
    if width > MOST_WIDTH:
        return module(*inputs)
    constants = tuple(x for x in inputs if not isinstance(x, Tensor))
    key = (rows, width, first.device, first.dtype, constants)
    graphs = _STEPS.setdefault(module, {})
    if key not in graphs:
        graphs[key] = Graph(_step, f"step_of_{width}", first.device)
    padded = (
        nn.functional.pad(x, (*[0] * (2 * x.dim() - 4), 0, width - n, 0, rows - count)) if isinstance(x, Tensor) else x
        for x in inputs
    )
    return tuple(x[:count, :n] for x in graphs[key].run(module, module, *padded) if x is not None)


def _step(module: nn.Module, *inputs: Tensor | int) -> tuple[Tensor, ...]:
    """Run a drafter's module; this is the function that is compiled."""
    return module(*inputs)


_STEPS: "WeakKeyDictionary[nn.Module, dict[tuple, Graph]]" = WeakKeyDictionary()
"""The compiled steps of drafters."""
_BUILT = _TAKEN = 0
"""Graphs that have been built, and calls of `take_graphs`."""
_FREE: "WeakKeyDictionary[nn.Module, list[PassGraphs]]" = WeakKeyDictionary()
"""Passes that no text uses; graphs and storage stay for the next call."""
_FREE_LOCK = Lock()


def take_graphs(model: PreTrainedModel, rows: int, longest: int) -> PassGraphs:
    """Return passes over `rows` texts of at most `longest` tokens; ones that were given back, where there are any."""
    global _TAKEN
    _require_thread(next(model.parameters()).device)
    slots = max(FEWEST_SLOTS, 1 << longest.bit_length())  # a power of two above `longest`
    with _FREE_LOCK:
        _TAKEN += 1
        # Layers that were replaced have left their states for good.
        free = _FREE[model] = [passes for passes in _FREE.get(model, ()) if passes.states.fits(model)]
        passes = next((passes for passes in free if passes.fits(model, rows, slots)), None)
        if passes is not None:
            free.remove(passes)
    if passes is None:
        return PassGraphs(model, rows, slots)
    passes.cache.clear(rows)
    return passes


def give_back(model: PreTrainedModel, graphs: PassGraphs) -> None:
    """Make passes available to later texts."""
    with _FREE_LOCK:
        _FREE.setdefault(model, []).append(graphs)


def _require_thread(device: torch.device) -> None:
    """Raise ConfigError where torch records CUDA graphs in the thread only that imported its module first.

    Later versions (torch 2.13) record the graphs of each thread. What torch does not say is not refused.
    """
    if device.type != "cuda":
        return
    trees: Any = import_module("torch._inductor.cudagraph_trees")
    try:
        trees.get_obj(trees.local, "tree_manager_containers")
    except AttributeError:
        return
    except AssertionError as error:
        name = current_thread().name
        raise ConfigError(
            f"compile=True in the thread {name!r}: this torch ({torch.__version__}) records CUDA graphs in the first "
            "thread that compiled; expected compile=False, that thread, or a newer torch"
        ) from error


def built_graphs() -> int:
    """Return the number of graphs that have been built."""
    return _BUILT
