"""CUDA can record the graphs of compiled passes. They are traced on torch's meta device, which computes nothing.

torch runs a graph without recording it, or in parts, where it writes to inputs that have no fixed address, or has
operators on the host; and it copies inputs without a fixed address before each replay. On a GPU, `tests/gpu` asserts
that torch has not left out a recording.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_cases import CASES, PROMPTS, SETTINGS, target_model
from conftest import mostly_slow
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch.utils._pytree import tree_leaves, tree_map_only

from draftsmith import SpeculativeDecoder
from draftsmith.decode.passes import graphs
from draftsmith.decode.passes.graphs import Graph, PassGraphs

First = tuple[Callable[..., Any], nn.Module, tuple]
"""A function that is compiled, the module in it, and the arguments of its first run."""


@pytest.fixture
def first_runs(monkeypatch: pytest.MonkeyPatch) -> list[First]:
    """The first run of every graph, on the CPU and not compiled."""
    runs: list[First] = []
    build, run = Graph.__init__, Graph.run

    def built(graph: Graph, plain: Any, *rest: Any) -> None:
        build(graph, plain, *rest)
        vars(graph)["plain"] = plain

    def recorded(graph: Graph, module: nn.Module, *arguments: Any) -> list[Tensor | None]:
        plain = vars(graph).pop("plain", None)
        if plain is not None:
            runs.append((plain, module, arguments))
        return run(graph, module, *arguments)

    monkeypatch.setitem(graphs.OPTIONS, "cpu", {"disable": True})
    monkeypatch.setattr(Graph, "__init__", built)
    monkeypatch.setattr(Graph, "run", recorded)
    return runs


def on_meta(module: nn.Module) -> nn.Module:
    """Return a copy on the meta device, with the parts of the target that a drafter shares."""
    moved = copy.deepcopy(module).to("meta")
    for part in moved.modules():
        for shared in getattr(part, "_shared", ()):
            shared.to("meta")
    return moved


@torch.inference_mode()
def traced(plain: Callable[..., Any], module: nn.Module, arguments: tuple) -> tuple[fx.GraphModule, set[int], int]:
    """Return the graph, the indices of its inputs at fixed addresses, and the number of tensors given to each run."""
    graphs: list[tuple[fx.GraphModule, set[int]]] = []

    def keep(graph: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        context = TracingContext.get()
        assert context.fw_metadata is not None
        graphs.append((graph, set(context.fw_metadata.static_input_indices)))
        return graph.forward

    backend = aot_autograd(fw_compiler=keep, keep_inference_input_mutations=True)
    function = torch.compile(plain, fullgraph=True, dynamic=False, backend=backend)
    moved, inputs = on_meta(module), tree_map_only(Tensor, lambda x: x.to("meta"), arguments)
    if isinstance(arguments[0], PassGraphs):
        passes = PassGraphs(moved, arguments[0].rows, arguments[0].slots)
        # The hooks that keep states and features are those of the module on the CPU.
        with passes.attention.running(chain=False):
            plain(passes, moved, inputs[2], False, ())  # the prompt's pass allocates the cache
            function(passes, moved, inputs[2], False, ())
    else:
        function(moved, *inputs[1:])
    torch._dynamo.reset()
    return *graphs[0], sum(isinstance(leaf, Tensor) for leaf in tree_leaves(arguments))


def devices(node: fx.Node) -> set[str]:
    return {leaf.device.type for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)}


@pytest.mark.parametrize("case", mostly_slow(CASES, "eagle3"))
def test_graphs_can_be_recorded(case: str, first_runs: list[First]) -> None:
    target = target_model()
    make, plan = CASES[case]
    decoder = SpeculativeDecoder(target, None if make is None else make(target).eval(), compile=True, **plan)
    for temperature in (0.0, 1.0):
        decoder.generate_batch(PROMPTS, **SETTINGS, temperature=temperature)
    assert {module for _, module, _ in first_runs} >= {target}
    for plain, module, arguments in first_runs:
        graph, fixed, given = traced(plain, module, arguments)
        nodes = list(graph.graph.nodes)
        places = [node for node in nodes if node.op == "placeholder"]
        written = {places.index(node.args[0]) for node in nodes if node.target is torch.ops.aten.copy_.default}
        assert written <= fixed, f"{plain.__name__} of {type(module).__name__} writes to memory that may move"
        writes = isinstance(arguments[0], PassGraphs)
        assert bool(written) == writes, "passes write to the cache, steps to nothing"
        assert len(places) - len(fixed) <= given, "weights or the cache would be copied before each replay"
        assert [str(node.target) for node in nodes if "cpu" in devices(node)] == []
