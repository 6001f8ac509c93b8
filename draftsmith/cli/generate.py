"""`draftsmith generate`: streamed text whose colours show which tokens the drafter proposed."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from draftsmith.cli.options import AGAIN, interruptible, measuring, suggest
from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.fastest import fastest_decoder
from draftsmith.decode.sequence import DecodeOutput, Round
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.conversation import Conversation, conversation
from draftsmith.distill.detokenize import IncrementalText
from draftsmith.eval.baseline import fastest_threads, threads
from draftsmith.eval.session import load_session
from draftsmith.eval.settings import PromptSettings
from draftsmith.terminal import Terminal

DRAFTED, OWN = "green", "bold"
"""Styles of tokens that the drafter proposed, and of the target's own tokens."""
PROBE_PROMPT, PROBE_TOKENS = 64, 4
"""Tokens that are read and decoded to choose the number of threads, several times."""


def _asked(prompt: str, files: Sequence[str]) -> Conversation:
    """Return the question about these images; ConfigError where a file does not exist."""
    parts = [{"type": "image", "path": str(Path(file).expanduser().absolute())} for file in files]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}
    return conversation("--image", {"messages": [message]}, Path(Path.cwd().anchor))


def _summary(out: DecodeOutput) -> str:
    """Return the tokens, tau and speed of a text in one line."""
    return (
        f"{len(out.tokens)} tokens, {sum(out.drafted)} of them drafted; tau {out.acceptance_length:.2f}, "
        f"{out.tokens_per_second:.0f} tokens/s, stopped by {out.stopped_by}"
    )


def _line_ended(console: Terminal) -> str:
    console.print()
    return AGAIN


def stream(settings: PromptSettings) -> None:
    """Decode the prompt and print the text as it is decoded; the summary is printed to stderr.

    With images, the prompt goes through the chat template.
    """
    prompt, images = settings.prompt, settings.image
    asked = _asked(prompt, images) if images else None
    session = load_session(settings, None, progress=False, images=bool(images))
    tokenizer, drafter = session.tokenizer, next(iter(session.drafters.values()), None)
    (temperature,) = settings.temperatures
    console, log = Terminal(soft_wrap=True), Terminal(stderr=True)
    encoder_decoder = session.target.config.is_encoder_decoder
    chat = Chat(tokenizer, processor=session.processor, encodes=encoder_decoder)
    ids, inputs = (chat.plain(prompt), None) if asked is None else chat.prompt_inputs(asked.messages, asked)
    text = IncrementalText(tokenizer, () if encoder_decoder else ids)
    if drafter is not None and console.is_terminal:
        log.print(Text.assemble(("proposed by the drafter", DRAFTED), ", ", ("chosen by the target", OWN)))

    def on_tokens(tokens: list[int], record: Round | None) -> None:
        if record is None:  # not before: an error about a setting stands on a line of its own
            console.print(Text(prompt), end="\n" if encoder_decoder or images else "")
        drafted = record.accepted if record is not None else 0
        for place, token in enumerate(tokens):
            console.print(Text(text.add(token), style=DRAFTED if place < drafted else OWN), end="")
        sys.stdout.flush()

    with (
        interruptible(lambda: _line_ended(console)),
        threads(fastest_threads(session.target, ids[-PROBE_PROMPT:], PROBE_TOKENS)),
    ):
        policy, rule = next(iter(settings.policies), None), settings.rule
        if settings.draft_length is None and policy is None:
            decoder = fastest_decoder(session.target, drafter, rule=rule, **settings.passes)
        else:
            plan = {"draft_length": settings.draft_length, "policy": policy, "rule": rule}
            decoder = SpeculativeDecoder(session.target, drafter, **plan, **settings.passes)
        out = decoder.generate(
            ids,
            inputs=inputs,
            on_tokens=on_tokens,
            tokenizer=tokenizer,
            max_new_tokens=settings.max_new_tokens,
            temperature=temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            seed=settings.seed,
            stop_strings=settings.stop,
        )
    console.print(Text(text.rest(), style=OWN))
    log.print(_summary(out) + ("" if decoder.lossless or temperature == 0 else f"; rule {settings.rule} is LOSSY"))
    if drafter is not None:
        suggest("draftsmith", *measuring("eval", settings), to_stderr=True)
