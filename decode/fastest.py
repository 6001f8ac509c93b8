"""The decoder that is fastest in most measurements: an adaptive chain of a hybrid of retrieval and the drafter.

It plans with costs that are measured in a few rounds, once for models of these shapes on a machine.
"""

from contextlib import suppress
from typing import Unpack

from transformers import PreTrainedModel

from draftsmith.decode.costs import Costs
from draftsmith.decode.decoder import PassSettings, SpeculativeDecoder
from draftsmith.decode.policies import AdaptiveChain
from draftsmith.decode.profiling import measure_costs
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter
from draftsmith.heads.retrieval import Hybrid
from draftsmith.provenance import environment, fingerprint
from draftsmith.storage import cache_dir

LARGEST_BATCH = 16
"""The largest batch that is measured: in larger ones the share of a sequence hardly changes."""


def fastest_decoder(
    target: PreTrainedModel,
    drafter: Drafter | None,
    *,
    rule: str | None = None,
    batch_size: int = 1,
    **options: Unpack[PassSettings],
) -> SpeculativeDecoder:
    """Return the decoder that is fastest in most measurements for batches of this size.

    Drafts are retrieved from the text, unless the rule needs drawn ones, else drafted while the next token is worth its
    seconds; where no draft of a batch can pay, the target decodes alone. With `compile`, where each length is another
    graph, drafts are the drafter's own chain. Sampled texts depend on the costs, see `stored_costs`.
    """
    plain = SpeculativeDecoder(target, drafter, rule=rule, **options)  # refuses what does not fit
    if drafter is None or plain.policy is None or options.get("compile"):
        return plain
    costs = options.get("costs")
    target = plain._model
    if costs is None:
        costs = stored_costs(target, drafter, batch_size=batch_size, invariant=options.get("invariant", False))
    policy, retrieves = AdaptiveChain(costs, batch_size=batch_size), type(drafter).retrieve is not Drafter.retrieve
    may_retrieve = plain.rule is None or not plain.rule.drawn
    if batch_size > 1 and not policy.may_pay(retrieved=retrieves or may_retrieve):
        return SpeculativeDecoder(target, **options)
    chosen = Hybrid(drafter) if may_retrieve and not retrieves else drafter
    return SpeculativeDecoder(target, chosen, policy=policy, rule=rule, **options)


_KNOWN: dict[str, Costs] = {}
"""Costs that `stored_costs` has returned, by their key."""


def stored_costs(target: PreTrainedModel, drafter: Drafter, *, batch_size: int = 1, invariant: bool = False) -> Costs:
    """Return one sequence's share of quickly measured costs, which later calls for models of these shapes reuse.

    They are kept in the folder `costs` of the cache. Lengths of drafts follow from them, and so do sampled texts.
    Batches are measured at the next power of two, and at most with `LARGEST_BATCH`.
    """
    batch_size = min(1 << (batch_size - 1).bit_length(), LARGEST_BATCH)
    while isinstance(drafter, Hybrid):
        drafter = drafter.drafter
    machine = environment()
    named = [(name, list(weight.shape), str(weight.dtype)) for name, weight in drafter.named_parameters()]
    own = target.config.to_dict()
    key = fingerprint(
        [
            {name: value for name, value in own.items() if not name.startswith("_") and name != "transformers_version"},
            [str(target.dtype), str(target.device), target.config._attn_implementation, invariant, batch_size],
            [drafter.type, drafter.max_draft_length, named],
            [machine[name] for name in ("versions", "cpu", "cpu_count", "torch_threads", "accelerator")],
        ]
    )
    if key not in _KNOWN:
        path = cache_dir() / "costs" / f"{key}.json"
        try:
            _KNOWN[key] = Costs.load(path)
        except ConfigError:  # not measured yet, or damaged
            costs = measure_costs(target, drafter, quick=True, texts=batch_size, invariant=invariant)
            _KNOWN[key] = costs.share(batch_size)
            with suppress(OSError):  # an unwritable cache: the costs hold for this process
                path.parent.mkdir(parents=True, exist_ok=True)
                _KNOWN[key].save(path)
    return _KNOWN[key]
