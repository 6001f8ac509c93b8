"""The measurement: every drafter and the target alone decode the same prompts, interleaved, in one process.

An arm is a drafter with a policy, or the target alone. The number of CPU threads is the one that is fastest for the
target alone, so that the baseline is not slowed down.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain, product
from typing import Any, Generic

from pydantic import TypeAdapter
from transformers import PreTrainedModel

from draftsmith.decode.costs import Costs
from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.passes.graphs import built_graphs
from draftsmith.decode.policies import plans
from draftsmith.decode.profiling import measure_costs
from draftsmith.distill.chat_template import Chat
from draftsmith.errors import ConfigError
from draftsmith.eval.baseline import compare_with_generate, fastest_threads, threads
from draftsmith.eval.compare import Condition
from draftsmith.eval.journal import AnyCell, Cell, Journal, Place
from draftsmith.eval.prompts import Prompt, PromptBatch, batches
from draftsmith.eval.session import fingerprints
from draftsmith.eval.settings import BASELINE, Arm, Settings
from draftsmith.heads.base import Drafter
from draftsmith.heads.model_config import decoding_limit
from draftsmith.provenance import environment
from draftsmith.terminal import Bars, Terminal, stage, units

COSTS_OF = "costs of "
"""Prefix of the journal's entries with the seconds of a drafter's passes; the drafter's name follows."""
WARM_UP_TOKENS = 16
CALIBRATION = 4
REPEAT_APART, TURN_APART = 10_007, 1_000_003
"""Differences between the seeds of two repeats and of two turns."""


Questions = list[Prompt]
"""Prompts up to the turn that is answered next."""


@dataclass
class Grid(Generic[AnyCell]):
    """The cells of a measurement, local or of servers: every arm answers the prompts at every place.

    `turns`: whether every turn is a cell of its own; otherwise a cell holds those of a batch.
    """

    prompts: list[Prompt]
    settings: Settings
    journal: Journal[AnyCell]
    turns: bool

    def __post_init__(self) -> None:
        self.batches = {size: batches(self.prompts, size) for size in self.settings.batch_sizes}

    @property
    def conditions(self) -> list[Condition]:
        """Every temperature with every batch size."""
        return list(product(self.settings.temperatures, self.settings.batch_sizes))

    def units(self, size: int) -> list[list[str]]:
        """Return the ids of the prompts of each batch."""
        return [[prompt.id for prompt in batch.prompts] for batch in self.batches[size]]

    def places(self) -> Iterator[Place]:
        """Yield every place in the order of measurement."""
        for repeat in range(self.settings.repeats):
            for condition in self.conditions:
                yield from self._places(repeat, *condition)

    def _places(self, repeat: int, temperature: float, size: int) -> Iterator[Place]:
        for group, batch in enumerate(self.batches[size]):
            for turn in range(batch.turns if self.turns else 1):
                yield Place(repeat, temperature, size, group, turn)

    def batch(self, place: Place) -> PromptBatch:
        return self.batches[place.batch_size][place.group]

    def order(self, arms: Iterable[Arm], place: Place) -> list[Arm]:
        """Return the arms in the order of measurement; the first of them changes from batch to batch."""
        order = deque(arms)
        order.rotate(-(place.group + place.repeat + place.turn))
        return list(order)

    def pending(self, arms: Iterable[Arm], place: Place) -> list[Arm]:
        """Return the arms without a cell at a place, in order."""
        return [arm for arm in self.order(arms, place) if (arm, place) not in self.journal.cells]

    def cells(self, arm: Arm, temperature: float, size: int, category: str | None = None) -> list[AnyCell]:
        """Return the cells of all batches, or of the batches whose prompts all have `category`."""
        every = chain(*(self._places(repeat, temperature, size) for repeat in range(self.settings.repeats)))
        chosen = (place for place in every if category in (None, self.batch(place).category))
        return [self.journal.cells[arm, place] for place in chosen if (arm, place) in self.journal.cells]


@dataclass
class EvaluationRun:
    """A measurement in progress: models, prompts, settings and the results so far.

    Raises:
        ConfigError: for models, prompts and settings that do not fit together.
    """

    target: PreTrainedModel
    drafters: dict[str, Drafter]
    prompts: list[Prompt]
    settings: Settings
    tokenizer: Any = None
    """The target's; needed for prompts of several turns."""
    journal: Journal[Cell] = field(default_factory=Journal[Cell])
    processor: Any = None
    """The target's; needed for prompts of several turns with images."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError("prompts=0; expected at least 1")
        if len({prompt.id for prompt in self.prompts}) < len(self.prompts):
            raise ConfigError.of("prompts", [prompt.id for prompt in self.prompts], "each id only once")
        if self.tokenizer is None and any(prompt.turns > 1 for prompt in self.prompts):
            raise ConfigError("tokenizer=None; expected the target's, for prompts of several turns")
        template = (self.settings.chat_template, self.settings.template_options)
        how = {"processor": self.processor, "encodes": self.target.config.is_encoder_decoder}
        self.chat = None if self.tokenizer is None else Chat(self.tokenizer, *template, **how)
        limits = [decoding_limit(self.target.config), *(drafter.context_limit for drafter in self.drafters.values())]
        self.context = min((limit for limit in limits if limit is not None), default=None)
        self.grid = Grid(self.prompts, self.settings, self.journal, turns=True)
        self._numbers = {prompt.id: number for number, prompt in enumerate(self.prompts)}
        self.left_out: list[str] = []
        """Requested arms that cannot be measured, and why."""
        self.options = {name: self._options(name, drafter) for name, drafter in self.drafters.items()}
        for drafter in self.drafters.values():
            SpeculativeDecoder(self.target, drafter, **self.settings.passes)  # refuses pairs that do not fit
        self.arms: dict[Arm, SpeculativeDecoder] = {}

    def measure(self, progress: bool = True) -> None:
        """Measure every cell that the journal does not hold yet, and append it."""
        self.journal.begin(self.settings, self.fingerprints, environment())
        if "threads" not in self.journal.facts:
            with stage("choosing the number of threads", shown=progress):
                self.journal.fact("threads", fastest_threads(self.target, self.prompts[0].input_ids))
        with threads(self.journal.facts["threads"]):  # policies plan with costs that depend on the threads
            self.arms = {BASELINE: SpeculativeDecoder(self.target, **self.settings.passes)}
            with stage("timing the passes of each drafter", shown=progress):
                for name, drafter in self.drafters.items():
                    self.arms |= self._arms(name, drafter)
            if any(self._pending(place) for place in self.grid.places()):
                with stage("warming up", shown=progress):
                    self._calibrate()
                    self._warm_up()
                self._decode_all(progress)
            if "ratio_interval" not in self.journal.facts.get("plain", {}):
                with stage("comparing the target alone with transformers' generate", shown=progress):
                    speeds = compare_with_generate(self.target, self.prompts, compile=self.settings.compile)
                    self.journal.fact("plain", speeds)

    @cached_property
    def fingerprints(self) -> dict[str, Any]:
        return fingerprints(self.target, self.drafters, self.prompts)

    @property
    def learners(self) -> list[str]:
        """Policies that adapt to what is accepted."""
        return sorted({arm[1] for arm, decoder in self.arms.items() if decoder.learns})

    def _asked(self, place: Place) -> Questions | None:
        """Return the prompts of a batch that have this turn, each up to it.

        Earlier turns are followed by the target's own answers, from the baseline in this repeat and batch size, so that
        all arms read the same text. A question that leaves no room in the context is omitted, and so are the turns
        after it. None if the baseline has not answered the earlier turns yet.
        """
        answers: dict[str, list[list[int]]] = {}
        for turn in range(place.turn):
            before = place._replace(turn=turn)
            cell = self.journal.cells.get((BASELINE, before))
            if cell is None:  # to be answered, or none of the batch's questions has room
                return [] if self._asked(before) == [] else None
            for text in cell.texts:
                answers.setdefault(text.prompt, []).append(text.tokens)
        questions: Questions = []
        for prompt in self.grid.batch(place).prompts:
            before = answers.get(prompt.id, [])
            if prompt.turns <= place.turn or len(before) < place.turn:
                continue
            asked = prompt.after(before, self.chat)
            if place.turn == 0 or self.context is None or len(asked.input_ids) < self.context:
                questions.append(asked)
        return questions

    def asked(self, place: Place) -> Questions:
        """Return the questions of a batch whose earlier turns have been answered."""
        questions = self._asked(place)
        assert questions is not None, "turns are measured in order"
        return questions

    def _options(self, name: str, drafter: Drafter) -> list[dict[str, Any]]:
        """Return the draft lengths and policies of this drafter, as arguments of the decoder."""
        most, policies = drafter.max_draft_length, self.settings.policies_of(name)
        long = [length for length in self.settings.draft_lengths if most is not None and length > most]
        lengths = [length for length in self.settings.draft_lengths if length not in long]
        if long and not lengths and not policies:
            raise ConfigError.of(
                "draft_length", long[0], f"at most {most}, which is what this {drafter.type} drafter proposes"
            )
        self.left_out += [f"{name} at gamma={length}: it proposes at most {most} tokens." for length in long]
        options = [{"draft_length": length} for length in lengths]
        options += [{"policy": policy} for policy in policies]
        return options or [{}]

    def _arms(self, name: str, drafter: Drafter) -> dict[Arm, SpeculativeDecoder]:
        """Return a decoder for each arm of the drafter."""
        arms, costs = {}, self._costs(name, drafter)
        for own in self.options[name]:
            options = {**own, "rule": self.settings.rule, **self.settings.passes}
            decoder = SpeculativeDecoder(self.target, drafter, costs=costs, **options)
            label = f"at most {drafter.max_draft_length}" if decoder.policy is None else str(decoder.policy)
            arms[(name, label)] = decoder  # drafters that only retrieve ignore the policy
        return arms

    def _costs(self, name: str, drafter: Drafter) -> Costs | None:
        """Return the seconds of passes with this drafter; None where passes are compiled and no policy plans.

        Compiled passes are not padded to faster widths, and measuring them compiles one for each width.
        """
        settings, fact = self.settings, COSTS_OF + name
        if settings.compile and not any(map(plans, settings.policies_of(name))):
            return None
        # JSON turns the widths, which are keys, into strings.
        known = {
            key: TypeAdapter(Costs).validate_python(value)
            for key, value in self.journal.facts.items()
            if key.startswith(COSTS_OF)
        }
        if fact not in known:
            # The same seconds of the target for all: measured separately, noise may change the padding of a width.
            verify = next((costs.verify for costs in known.values()), None)
            known[fact] = measure_costs(
                self.target, drafter, compile=settings.compile, verify=verify, text=self.prompts[0].input_ids
            )
            self.journal.fact(fact, asdict(known[fact]))
        return known[fact]

    def _pending(self, place: Place) -> list[Arm]:
        return [] if self._asked(place) == [] else self.grid.pending(self.arms, place)

    def _calibrate(self) -> None:
        """Decode a few texts at each temperature, untimed, for policies that learn."""
        for decoder in self.arms.values():
            for temperature in self.settings.temperatures if decoder.learns else ():
                prompts = self.prompts[:CALIBRATION]
                options = {"max_new_tokens": self.settings.max_new_tokens, **self._sampling(temperature)}
                decoder.calibrate([p.input_ids for p in prompts], inputs=[p.inputs for p in prompts], **options)

    def _warm_up(self) -> None:
        """Decode once with every arm, unmeasured: first calls allocate memory and choose kernels.

        Compiled passes depend on the length of the texts, so these are whole ones.
        """
        tokens = self.settings.max_new_tokens if self.settings.compile else WARM_UP_TOKENS
        for arm, condition in product(self.arms, self.grid.conditions):
            place = Place(0, *condition, 0, 0)
            self._answer(arm, place, self.asked(place), tokens)

    def _decode_all(self, progress: bool) -> None:
        with Bars(*units(), console=Terminal(stderr=True), disable=not progress) as bar:
            done = len(self.journal.cells)
            total = len(self.arms) * len([*self.grid.places()])
            task = bar.add_task("measuring", total=total, completed=done)
            for place in self.grid.places():
                asked = self.asked(place)
                for arm in self._pending(place):
                    self.journal.add(self._answer(arm, place, asked, self.settings.max_new_tokens))
                    bar.advance(task)
                if not asked:
                    total -= len(self.arms)
                    bar.update(task, total=total)

    def _answer(self, arm: Arm, place: Place, asked: Questions, tokens: int) -> Cell:
        """Decode one batch; seeds differ between texts, repeats and turns.

        Decode it again where passes were compiled meanwhile, whose seconds do not count.
        """
        first = self.settings.seed + REPEAT_APART * place.repeat + TURN_APART * place.turn
        graphs, outputs = -1, []
        while graphs != built_graphs():
            graphs = built_graphs()
            outputs = self.arms[arm].generate_batch(
                [prompt.input_ids for prompt in asked],
                inputs=[prompt.inputs for prompt in asked],
                max_new_tokens=tokens,
                seeds=[first + self._numbers[prompt.id] for prompt in asked],
                **self._sampling(place.temperature),
            )
        return Cell.of(arm, place, [prompt.id for prompt in asked], outputs)

    def _sampling(self, temperature: float) -> dict[str, Any]:
        return asdict(self.settings.sampling(temperature))
