"""`draftsmith generate`: streamed text whose colours show which tokens the drafter proposed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from draftsmith.cli.options import measuring, suggest
from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.sequence import DecodeOutput, Round
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.detokenize import IncrementalText
from draftsmith.distill.sources import Conversation, conversation
from draftsmith.errors import ConfigError
from draftsmith.eval.baseline import fastest_threads, threads
from draftsmith.eval.settings import PairSettings, load_session, require_valid
from draftsmith.safe_text import Terminal

DRAFTED, OWN = "green", "bold"
"""Styles of tokens that the drafter proposed, and of the target's own tokens."""
PROBE_PROMPT, PROBE_TOKENS = 64, 4
"""Tokens that are read and decoded to choose the number of threads, several times."""


@dataclass(frozen=True)
class GenerateRequest(PairSettings):
    """Settings of one text: at most one drafter, one temperature and one policy."""

    draft_length: int | None = None
    max_new_tokens: int = 128
    stop_strings: tuple[str, ...] = ()
    image_files: tuple[str, ...] = ()
    """Images before the prompt, which then goes through the chat template."""


def _asked(prompt: str, files: tuple[str, ...]) -> Conversation:
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


@contextmanager
def _interruptible(console: Terminal) -> Iterator[None]:
    """End the line of the text on Ctrl-C, and say that nothing is stored."""
    try:
        yield
    except KeyboardInterrupt as stop:
        console.print()
        raise KeyboardInterrupt("interrupted; nothing is stored, and the same command begins again") from stop


def stream(prompt: str, request: GenerateRequest, *, trust_remote_code: bool) -> None:
    """Decode `prompt` and print the text as it is decoded; the summary is printed to stderr."""
    require_valid(request, counts={"gamma": [request.draft_length], "max-new-tokens": [request.max_new_tokens]})
    if request.draft_length is not None and request.policies:
        raise ConfigError(f"gamma={request.draft_length} and policy={request.policies[0]}; expected one of the two")
    if "" in request.stop_strings:
        raise ConfigError.of("stop", "", "a string of at least one character")
    images = bool(request.image_files)
    asked = _asked(prompt, request.image_files) if images else None
    session = load_session(request, None, trust_remote_code=trust_remote_code, progress=False, images=images)
    tokenizer, drafter = session.tokenizer, next(iter(session.drafters.values()), None)
    (temperature,) = request.temperatures
    console, log = Terminal(soft_wrap=True), Terminal(stderr=True)
    decoder = SpeculativeDecoder(
        session.target,
        drafter,
        draft_length=request.draft_length,
        policy=next(iter(request.policies), None),
        rule=request.rule,
        **request.passes,
    )
    encoder_decoder = session.target.config.is_encoder_decoder
    ids, inputs = tokenizer(prompt)["input_ids"], None
    if asked is not None:
        ids, inputs = Chat(tokenizer, processor=session.processor).prompt_inputs(asked.messages, asked)
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
        _interruptible(console),
        threads(fastest_threads(session.target, ids[-PROBE_PROMPT:], PROBE_TOKENS)),
    ):
        out = decoder.generate(
            ids,
            inputs=inputs,
            on_tokens=on_tokens,
            tokenizer=tokenizer,
            max_new_tokens=request.max_new_tokens,
            temperature=temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=request.seed,
            stop_strings=request.stop_strings,
        )
    console.print(Text(text.rest(), style=OWN))
    log.print(_summary(out) + ("" if decoder.lossless or temperature == 0 else f"; rule {request.rule} is LOSSY"))
    if drafter is not None:
        words = measuring(request.target, request.drafters.values(), request.prompts, request)
        suggest("draftsmith", "eval", *words, to_stderr=True)
