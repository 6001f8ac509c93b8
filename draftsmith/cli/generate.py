"""`draftsmith generate`: streamed text that shows which tokens the drafter wrote in pencil."""

import sys

from rich.text import Text

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.policies import check_policy
from draftsmith.decode.sampling import Sampling, require_seed
from draftsmith.decode.sequence import Round
from draftsmith.decode.verification import rule_named
from draftsmith.distill.detokenize import IncrementalText
from draftsmith.distill.load_target import check_target_name, load_target
from draftsmith.errors import ConfigError
from draftsmith.heads.checkpoint import is_named, load_drafter, parse_named
from draftsmith.safe_text import Terminal

PENCIL, INK = "green", "bold"


def stream(
    prompt: str,
    target: str,
    drafter: str | None,
    plan: dict,
    settings: dict,
    *,
    dtype: str,
    trust_remote_code: bool,
) -> None:
    """Decode `prompt` and print it while it grows; the summary goes to stderr."""
    Sampling(settings["temperature"], settings["top_k"], settings["top_p"])
    require_seed("seed", settings["seed"])
    if plan["draft_length"] is not None and plan["draft_length"] < 1:
        raise ConfigError.of("gamma", plan["draft_length"], ">= 1")
    if plan["policy"] is not None:
        check_policy(plan["policy"])
    if plan["rule"] is not None:
        rule_named(plan["rule"])
    if drafter is not None and is_named(drafter):
        parse_named(drafter)
    check_target_name(target)
    loaded = load_target(target, dtype=dtype, trust_remote_code=trust_remote_code)
    tokenizer = loaded.tokenizer
    loaded_drafter = load_drafter(drafter, loaded.model, tokenizer) if drafter else None
    decoder = SpeculativeDecoder(loaded.model, loaded_drafter, **plan)
    console, log = Terminal(soft_wrap=True, files_as_is=True), Terminal(stderr=True)
    reads_apart = loaded.model.config.is_encoder_decoder
    ids = tokenizer(prompt)["input_ids"]
    text = IncrementalText(tokenizer, () if reads_apart else ids)
    if loaded_drafter is not None and console.is_terminal:
        log.print(Text.assemble(("written by the drafter", PENCIL), ", ", ("written by the target", INK)))

    def on_tokens(tokens: list[int], record: Round | None) -> None:
        drafted = record.accepted if record is not None else 0
        for place, token in enumerate(tokens):
            console.print(Text(text.add(token), style=PENCIL if place < drafted else INK), end="")
        sys.stdout.flush()

    console.print(Text(prompt), end="\n" if reads_apart else "")
    out = decoder.generate(ids, on_tokens=on_tokens, tokenizer=tokenizer, **settings)
    console.print(Text(text.rest(), style=INK))
    accepted = sum(min(record.accepted, record.committed) for record in out.rounds)
    log.print(
        f"{len(out.tokens)} tokens, {accepted} of them drafted; tau {out.acceptance_length:.2f}, "
        f"{out.tokens_per_second:.0f} tokens/s, stopped by {out.stopped_by}"
        + ("" if decoder.lossless or settings["temperature"] == 0 else f"; rule {plan['rule']} is LOSSY")
    )
