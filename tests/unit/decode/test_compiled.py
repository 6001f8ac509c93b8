"""Compiled passes return the texts of uncompiled ones, and each is built once."""

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from threading import Thread
from typing import Any, NoReturn

import pytest
import torch
from compiled_cases import CASES, PROMPTS, SETTINGS, draft_model, eagle, target_model, target_of
from conftest import make_llama, mostly_slow
from torch._dynamo.utils import counters
from torch._inductor import cpu_vec_isa
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessor,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    T5Config,
)
from transformers import T5ForConditionalGeneration as T5

from draftsmith import SpeculativeDecoder
from draftsmith.decode.cache.recurrent import LOCK
from draftsmith.decode.costs import Costs
from draftsmith.decode.draws import SeededDraws
from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.passes import graphs
from draftsmith.decode.passes.base import Reading
from draftsmith.decode.passes.compiled import CompiledPasses
from draftsmith.decode.passes.eager import EagerPasses
from draftsmith.decode.passes.graphs import MOST_WIDTH, PassGraphs, built_graphs, run_step
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.decode.policies import StaticTree
from draftsmith.decode.policies.base import most_nodes
from draftsmith.decode.profiling import LONG, SHORT, measure_costs
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.medusa import Medusa


@pytest.fixture(autouse=True)
def _no_second_graph() -> Iterator[None]:
    """torch raises an error instead of compiling the same pass again."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace passes and run their graphs as they are: the path of a compiled pass without its minutes of compilation."""
    monkeypatch.setitem(graphs.OPTIONS, "cpu", {"backend": "eager"})


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the code of compiled passes as it is, where their graphs are not what is tested."""
    monkeypatch.setitem(graphs.OPTIONS, "cpu", {"disable": True})


def compare(target: torch.nn.Module, case: str) -> int:
    """Check the texts of a ragged batch, and that a second call builds no graph; return the number of graphs."""
    make, plan = CASES[case]
    torch.manual_seed(1)
    drafter = None if make is None else make(target).eval()
    eager = SpeculativeDecoder(target, drafter, **plan)
    fast = SpeculativeDecoder(target, drafter, compile=True, **plan)
    before, lengths = built_graphs(), []
    for temperature in (0.0, 1.0):
        settings = {**SETTINGS, "temperature": temperature}
        expected = [out.tokens for out in eager.generate_batch(PROMPTS, **settings)]
        assert [out.tokens for out in fast.generate_batch(PROMPTS, **settings)] == expected
        graphs = built_graphs(), counters["stats"]["unique_graphs"]
        assert [out.tokens for out in fast.generate_batch(PROMPTS, **settings)] == expected
        assert (built_graphs(), counters["stats"]["unique_graphs"]) == graphs
        lengths.append(set(map(len, expected)))
    assert max(map(len, lengths)) > 1, "the texts should end at different times"
    return built_graphs() - before


@pytest.mark.parametrize(
    ("case", "graphs"),
    [
        ("draft_model", 5),  # the target's pass; the drafter's over 1 and 2 tokens, chains that are chosen and drawn
        pytest.param("tree", 4, marks=pytest.mark.slow),
        ("eagle3", 5),
        pytest.param("mtp", 6, marks=pytest.mark.slow),
        pytest.param("peagle", 2, marks=pytest.mark.slow),
        ("dflash", 2),  # features and the block are one pass
        pytest.param("dspark, tree", 4, marks=pytest.mark.slow),  # and biases of 1 and of 3 nodes
        ("medusa", 4),  # three heads
        pytest.param("hydra", 7, marks=pytest.mark.slow),
        pytest.param("dspark", 3, marks=pytest.mark.slow),
        ("recurrent target alone", 1),
        # Committed tokens of both models are moved into their states; the drafter's pass over 1 token may be the first.
        pytest.param("recurrent draft_model", 8, marks=pytest.mark.slow),
        ("recurrent target, eagle3", 7),
    ],
)
def test_texts_equal_those_of_uncompiled_passes(traced: None, case: str, graphs: int) -> None:
    assert compare(target_of(case), case) == graphs


@pytest.mark.parametrize("vectors", mostly_slow([False, True], False))
def test_inductor_on_a_cpu(vectors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With vector instructions, torch first compiles three programs to find out which ones this machine has."""
    if not vectors:
        monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    assert compare(target_model(), "target alone") == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_inductor_for_every_kind_of_pass(case: str) -> None:
    compare(target_of(case), case)


def mistral() -> MistralForCausalLM:
    """A model whose layers attend to the last 2 tokens: fewer than a draft has."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 2, "initializer_range": 0.5}
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**sizes, max_position_embeddings=128)).eval().double()


def gpt2() -> GPT2LMHeadModel:
    """A model with 32 learned positions, which a text fills to the last, and attention with additive masks."""
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32, "initializer_range": 0.2}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)).eval().double()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("model", [mistral, pytest.param(gpt2, marks=pytest.mark.slow)])
def test_windows_and_the_end_of_the_context(traced: None, model: Callable[[], torch.nn.Module]) -> None:
    target = model()
    drafter = DraftModel(model())
    for policy in ("chain:draft_length=3", "tree:widths=3x1x1"):
        decoders = [SpeculativeDecoder(target, drafter, policy=policy, compile=on) for on in (False, True)]
        texts = [
            # Sampled, so that a tree's other branches are accepted too.
            decoder.generate(PROMPTS[2], max_new_tokens=100, eos_token_id=None, temperature=1.0).tokens
            for decoder in decoders
        ]
        assert texts[0] == texts[1]
        assert len(texts[0]) >= 23


WHOLE = {"eos_token_id": None, "temperature": 1.0}
COSTS = Costs({1: 1.0, 64: 1.1}, {1: 0.01, 64: 0.02})


@pytest.mark.parametrize(
    "policy",
    [
        "tree:widths=8x3x1",
        "sampled-tree:width=20,depth=3",
        *mostly_slow(["best-first:size=40", "optimal-tree:size=40"]),
    ],
)
def test_trees_at_the_end_of_the_storage(untraced: None, policy: str) -> None:
    """The slots of storage are a power of two above the longest text; the nodes of its last drafts have slots too."""
    target = make_llama(num_hidden_layers=1, max_position_embeddings=512).double()
    drafter = DraftModel(make_llama(1, num_hidden_layers=1, max_position_embeddings=512).double())
    plain, fast = (SpeculativeDecoder(target, drafter, policy=policy, costs=COSTS, compile=on) for on in (False, True))
    for seed in range(4):
        prompt = [5 + seed, 9] * 50
        settings = {**WHOLE, "max_new_tokens": 127 - len(prompt), "seed": seed}
        assert fast.generate(prompt, **settings).tokens == plain.generate(prompt, **settings).tokens


def test_storage_has_slots_for_the_nodes_that_each_model_reads(untraced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter, longest = target_model(), DraftModel(target_model()), dict[torch.nn.Module, int]()

    def taken(model: PreTrainedModel, rows: int, tokens: int) -> PassGraphs:
        longest[model] = tokens
        return graphs.take_graphs(model, rows, tokens)

    monkeypatch.setattr("draftsmith.decode.passes.compiled.take_graphs", taken)
    decoder = SpeculativeDecoder(target, drafter, policy="best-first:size=5,depth=3", compile=True)
    decoder.generate([5, 9], max_new_tokens=10, eos_token_id=None)
    assert longest == {target: 12 + 5, drafter.model: 12 + 5 * 3}


def sharp(seed: int, factor: float) -> torch.nn.Module:
    model = make_llama(seed, num_hidden_layers=1, max_position_embeddings=512)
    model.lm_head.weight.data *= factor
    return model


@pytest.mark.parametrize("factor", [0.3, 6.0], ids=["flat", "sharp"])
@pytest.mark.parametrize(
    "policy",
    ["sampled-tree:width=4,depth=4", "best-first:size=6,depth=6", "optimal-tree:size=6"],
)
def test_trees_have_no_more_nodes_than_they_say(policy: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled passes have slots for these; the slots that a drafter has taken are counted after each of its passes."""
    target, drafter, read, verified = sharp(0, factor), DraftModel(sharp(0, factor)), [0], [0]
    extend = ModelRunner.extend

    def counted(runner: ModelRunner, *arguments: Any) -> torch.Tensor:
        logits = extend(runner, *arguments)
        read.append(runner._drafted.slots)
        return logits

    monkeypatch.setattr(ModelRunner, "extend", counted)
    for temperature in (0.0, 1.0):
        decoder = SpeculativeDecoder(target, drafter, policy=policy, costs=COSTS)
        decoder.calibrate([[5, 9]], temperature=temperature, max_new_tokens=40)
        for seed in range(3):
            settings = {**WHOLE, "temperature": temperature, "max_new_tokens": 100, "seed": seed}
            verified += [record.drafted for record in decoder.generate([5, 9, 33], **settings).rounds]
    most = most_nodes(decoder.policy, greedy=False)
    assert 3 < max(verified) <= most.verified
    assert (3 if factor > 1 else 0) <= max(read) <= most.read


def test_two_threads_do_not_take_the_same_storage(untraced: None) -> None:
    """Both ask for it while another thread is in a pass of a recurrent model, whose lock the search waits for."""
    target = target_model()
    given = graphs.take_graphs(target, 1, 40)
    graphs.give_back(target, given)
    taken: list[PassGraphs] = []
    threads = [Thread(target=lambda: taken.append(graphs.take_graphs(target, 1, 40))) for _ in range(2)]
    with LOCK:
        for thread in threads:
            thread.start()
            thread.join(0.2)  # it waits
    for thread in threads:
        thread.join()
    assert len({id(passes) for passes in taken}) == 2
    assert given in taken


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[torch.nn.Module, bool], set[int]]:
    """The widths of passes after the prompt, by model and whether they were compiled, where a decoder compiles."""
    seen = defaultdict[tuple[torch.nn.Module, bool], set[int]](set)

    def recorded(read: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
        def record(self: Any, reading: Reading) -> Any:
            if max(self.cache.lengths) > 0:
                seen[self.model, compiled].add(reading.width)
            return read(self, reading)

        return record

    monkeypatch.setattr(CompiledPasses, "_run", recorded(CompiledPasses._run, True))
    monkeypatch.setattr(EagerPasses, "read", recorded(EagerPasses.read, False))
    return seen


def test_widths_of_passes(untraced: None, widths: dict) -> None:
    """Those of the target are as wide as its drafts, to the end of the text; the drafter's are a power of two."""
    target = target_model()
    drafter = DraftModel(target_model())  # of which everything is accepted
    decoder = SpeculativeDecoder(target, drafter, policy="tree:widths=3x1x1", compile=True)
    decoder.generate(PROMPTS[2], max_new_tokens=24, eos_token_id=None)
    assert widths == {(target, True): {10}, (drafter.model, True): {2, 4}}


def test_wide_passes_are_neither_padded_nor_compiled(
    untraced: None, widths: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those of the usual width."""
    monkeypatch.setattr("draftsmith.decode.passes.compiled.MOST_WIDTH", 2)
    target = target_model()
    drafter = DraftModel(target_model())  # of which everything is accepted
    decoder = SpeculativeDecoder(target, drafter, policy="tree:widths=3x1x1", compile=True)
    decoder.generate(PROMPTS[2], max_new_tokens=24, eos_token_id=None)
    assert widths == {(target, True): {10}, (drafter.model, True): {2}, (drafter.model, False): {3}}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compiled passes of drafters and target that have run: "pass", or "chain" for several at once."""
    runs: list[str] = []

    def recorded(kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def record(*arguments: Any) -> Any:
            runs.append(kind)
            return run(*arguments)

        return record

    monkeypatch.setattr(PassGraphs, "run", recorded("pass", PassGraphs.run))
    monkeypatch.setattr(PassGraphs, "chain", recorded("chain", PassGraphs.chain))
    return runs


@pytest.mark.parametrize("make", mostly_slow([draft_model, eagle], eagle))
def test_a_chain_is_one_graph(traced: None, ran: list[str], make: Callable[[torch.nn.Module], Drafter]) -> None:
    """A round runs three: committed tokens, the rest of the draft, the target. Drafts are shorter near the end.

    The first round has no pass over committed tokens: its logits follow from the pass over the prompt.
    """
    target = target_model()
    drafter = make(target)
    decoders = [SpeculativeDecoder(target, drafter, draft_length=4, compile=on) for on in (False, True)]
    for temperature in (0.0, 0.7):
        ran.clear()
        settings = {"temperature": temperature, "max_new_tokens": 40, "eos_token_id": None}
        expected, own = (decoder.generate(PROMPTS[0], **settings) for decoder in decoders)
        assert own.tokens == expected.tokens
        overlaps = [[value for record in out.rounds for value in record.overlap] for out in (own, expected)]
        assert overlaps[0] == pytest.approx(overlaps[1], abs=1e-9)
        whole = sum(record.drafted == 4 for record in own.rounds)
        assert ["pass", *ran[: 3 * whole - 1]] == ["pass", "chain", "pass"] * whole
        assert whole >= 5
        assert "chain" not in ran[3 * whole - 1 :]
        assert len(own.rounds) > whole


class Tripled(LogitsProcessor):
    """Reads the scores alone, which the decoder cannot know."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return 3 * scores


@pytest.mark.parametrize(
    "reason", ["top_p", "top_k", "processor", "cold", "layers", "siblings", "ranks", "draws", "vocabulary"]
)
def test_chains_that_are_not_one_graph(
    untraced: None, ran: list[str], monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Where the logits are cut or processed, the model is deep, or the draft is not a chain of all texts' likeliest or
    drawn tokens."""
    target = target_model()
    drafter = draft_model(target)
    if reason == "vocabulary":
        drafter.model.resize_token_embeddings(72)
        drafter = DraftModel(drafter.model)
        drafter.shared_vocabulary = 64
    settings = {"temperature": 1.0, "max_new_tokens": 30, "eos_token_id": None}
    settings |= {"top_p": {"top_p": 0.8}, "top_k": {"top_k": 5}, "cold": {"temperature": 1e-7}}.get(reason, {})
    settings |= {"logits_processor": [Tripled()]} if reason == "processor" else {}
    if reason == "layers":
        monkeypatch.setattr("draftsmith.decode.passes.compiled.MOST_LAYERS", 2)
    if reason == "draws":
        monkeypatch.setattr(SeededDraws, "chain", lambda draws, length: None)
    plans = {"siblings": {"policy": "tree:widths=2x1"}, "ranks": {"policy": StaticTree(((1,), (1, 0)))}}
    plan = plans.get(reason, {"draft_length": 4})
    expected, own = (
        SpeculativeDecoder(target, drafter, compile=on, **plan).generate(PROMPTS[0], **settings) for on in (False, True)
    )
    assert own.tokens == expected.tokens
    assert "pass" in ran
    assert "chain" not in ran


def test_policies_that_plan_know_the_seconds_of_single_steps(
    untraced: None, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their drafts are built step by step, so a chain that is one graph is not what they pay for."""
    target, drafted, of_round = target_model(), set(), DecodeLoop.round

    def recorded(loop: DecodeLoop) -> list:
        out = of_round(loop)
        drafted.update(record.drafted for _, _, record in out)
        return out

    monkeypatch.setattr(DecodeLoop, "round", recorded)
    measure_costs(target, draft_model(target), widest=2, compile=True)
    assert drafted == {SHORT, LONG}
    assert "pass" in ran
    assert "chain" not in ran


class Halves(torch.nn.Module):
    """A step of one input."""

    def forward(self, x_BnH: torch.Tensor) -> tuple[torch.Tensor]:
        return (x_BnH / 2,)


def test_widths_of_steps(untraced: None) -> None:
    step = Halves()
    for nodes in (1, 2, 3, 5, 8, MOST_WIDTH, MOST_WIDTH + 1):
        x_BnH = torch.randn(2, nodes, 4)
        assert torch.equal(run_step(step, 3, x_BnH)[0], x_BnH / 2)
    assert [key[:2] for key in graphs._STEPS[step]] == [(3, width) for width in (1, 2, 4, 8, MOST_WIDTH)]


def hooks_of(model: torch.nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


@pytest.mark.parametrize("compile", [False, True])
def test_hooks_are_removed(untraced: None, compile: bool) -> None:
    """Compiled passes have hooks while they run; others until the call ends, as it does by an error."""
    target = target_model()
    drafter = eagle(target)
    decoder = SpeculativeDecoder(target, drafter, draft_length=3, compile=compile)
    hooks = []

    def count(tokens: list[int], _: object) -> None:
        hooks.append(hooks_of(target))
        if len(hooks) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.generate(PROMPTS[0], on_tokens=count, max_new_tokens=24, eos_token_id=None)
    assert hooks == [0 if compile else 3] * 4  # of two layers' features, and of the lm_head's input
    assert hooks_of(target) == hooks_of(drafter) == 0


@pytest.mark.slow
def test_wide_passes_run_uncompiled_on_the_same_storage(untraced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.decode.passes.compiled.MOST_WIDTH", 2)
    target = target_model()
    plan = {"policy": "best-first:size=7,depth=3"}
    expected, own = (
        SpeculativeDecoder(target, Medusa.from_target(target), compile=on, **plan).generate_batch(PROMPTS, **SETTINGS)
        for on in (False, True)
    )
    assert [out.tokens for out in own] == [out.tokens for out in expected]


def test_a_call_inside_another_has_storage_of_its_own(untraced: None) -> None:
    target = target_model()
    outer, inner = (SpeculativeDecoder(target, compile=True) for _ in range(2))
    expected = SpeculativeDecoder(target).generate(PROMPTS[0], **SETTINGS).tokens
    texts = []

    def decode_again(tokens: list[int], _: object) -> None:
        if len(texts) < 2:
            texts.append(inner.generate(PROMPTS[0], **SETTINGS).tokens)

    for _ in range(2):  # the second time with storage that was used before
        texts.clear()
        assert outer.generate(PROMPTS[0], on_tokens=decode_again, **SETTINGS).tokens == expected
        assert texts == [expected, expected]


def test_nothing_of_an_earlier_text_is_read(untraced: None) -> None:
    """NaN in a slot that no token sees would reach every token through attention: 0 * NaN is NaN."""
    target = target_model()
    decoder = SpeculativeDecoder(target, compile=True)
    expected = decoder.generate(PROMPTS[0], **SETTINGS).tokens
    (passes,) = graphs._FREE[target]
    with torch.inference_mode():
        for layer in passes.cache.layers:
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.nan)
    assert decoder.generate(PROMPTS[0], **SETTINGS).tokens == expected


@pytest.mark.parametrize("part", ["target", "head"])
def test_graphs_are_compared_with_their_model_once_in_a_call(traced: None, part: str) -> None:
    """A module that is replaced is not noticed by the call in which that happens, but by the next one."""
    target = target_model()
    drafter = Medusa.from_target(target, num_heads=1).double().eval()
    parent, name = (target.model.layers[0].mlp, "act_fn") if part == "target" else (drafter.blocks[0][0], "activation")
    decoder = SpeculativeDecoder(target, drafter, compile=True)
    settings = {"max_new_tokens": 16, "eos_token_id": None}
    own, expected = getattr(parent, name), decoder.generate(PROMPTS[0], **settings).tokens
    rounds = 0

    def replace_part(tokens: list[int], record: object) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 3:
            setattr(parent, name, torch.nn.ReLU())

    assert decoder.generate(PROMPTS[0], on_tokens=replace_part, **settings).tokens == expected
    assert rounds > 4
    with pytest.raises(ConfigError, match=r"compile=True: torch\.compile fails"):  # see `_no_second_graph`
        decoder.generate(PROMPTS[0], **settings)
    setattr(parent, name, own)
    assert decoder.generate(PROMPTS[0], **settings).tokens == expected


def test_passes_are_freed_with_their_model(traced: None) -> None:
    target = target_model()
    SpeculativeDecoder(target, compile=True).generate(PROMPTS[0], **SETTINGS)
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(("answer", "refused"), [(None, False), (AssertionError, True), (AttributeError, False)])
def test_threads_in_which_torch_records_no_graph_are_refused(
    answer: type[Exception] | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is asked: 2.13 has graphs for each thread, earlier versions raise an error; another one may not say."""
    if answer is not None:
        trees = import_module("torch._inductor.cudagraph_trees")
        monkeypatch.setattr(trees, "get_obj", lambda *_: raise_(answer()))
    errors: list[str] = []

    def ask() -> None:
        try:
            graphs._require_thread(torch.device("cuda"))
        except ConfigError as error:
            errors.append(str(error))

    thread = Thread(target=ask, name="worker")
    thread.start()
    thread.join()
    assert bool(errors) == refused
    assert not errors or errors[0].startswith("compile=True in the thread 'worker': this torch (")


def raise_(error: Exception) -> NoReturn:
    raise error


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(ConfigError, match="compile=True with an encoder-decoder target"):
        SpeculativeDecoder(T5(config).eval(), compile=True)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(ConfigError, match="model_type='bloom': it takes its masks and positions from indices"):
        SpeculativeDecoder(bloom, compile=True)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"compile=True without a C\+\+ compiler"):
        SpeculativeDecoder(target_model(), compile=True)
