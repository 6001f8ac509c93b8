"""`draftsmith adapt --live`: answers to requests in the order of arrival, by a drafter that learns from them."""

import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import typer

from draftsmith.cli.learning import Learned, require_learnable
from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.detokenize import text_after
from draftsmith.distill.sources import json_lines
from draftsmith.errors import ConfigError
from draftsmith.eval.prompts import Prompt, PromptRows, arriving
from draftsmith.eval.session import Session, load_session
from draftsmith.eval.settings import PairSettings, require_valid
from draftsmith.heads.checkpoint import is_named
from draftsmith.heads.model_config import context_limit
from draftsmith.heads.validation import local_folder, read_config
from draftsmith.locks import LOCK, hold_folder
from draftsmith.safe_text import printable
from draftsmith.storage import is_leftover, require_writable
from draftsmith.train.interrupts import Stopping

STDIN, DRAFTER = "-", "drafter"


@dataclass(frozen=True)
class LiveRequest(PairSettings):
    """Settings of `draftsmith adapt --live`: one drafter and temperature; the prompts may be '-', lines on stdin."""

    max_new_tokens: int = 128
    every: int | None = None
    """Decoded tokens for each optimizer step; None: a tenth of the time."""
    out: Path = Path("runs/live")


def target_of(drafter: str, target: str | None) -> str:
    """Return `target`, or the name that the drafter's checkpoint holds; ConfigError where there is neither."""
    stored = None
    if target is None and not is_named(drafter):
        stored = read_config(local_folder(drafter), drafter)[1]
    name = target or (None if stored is None else stored.target.name)
    if name is None:
        raise ConfigError(f"drafter={drafter} names no target; expected --target")
    return name


def serve(request: LiveRequest, *, trust_remote_code: bool) -> str:
    """Answer every request on stdout, one JSON line each, and return the folder of the drafter that has learned."""
    ((name, given),) = request.drafters.items()
    saved = request.out / DRAFTER
    require_valid(
        request, counts={"max-new-tokens": [request.max_new_tokens], "every": [request.every]}, out=request.out
    )
    _require_own(request.out)
    require_learnable(given, learn=True, save=saved)
    rows = None if request.prompts == STDIN else PromptRows.read(request.prompts)
    with hold_folder("out", request.out):
        path = str(saved) if saved.is_dir() else given
        if path != given:
            _log(f"continues with {path}")
        request = replace(request, drafters={name: path})
        session = load_session(request, rows, trust_remote_code=trust_remote_code)
        learned = Learned(session, request.target, path, saved, request.seed, request.every)
        decoder = SpeculativeDecoder(session.target, session.drafters[name], learn=learned.learning)
        answers = sys.stdout
        with redirect_stdout(sys.stderr), Stopping() as stopping:  # some libraries log to stdout
            try:
                for number, prompt in enumerate(_requests(session, rows, stopping)):
                    _answer(decoder, session, request, prompt, number, answers)
                    if stopping.received is not None:
                        break
            finally:
                learned.finish(_log)
    return str(saved)


def _require_own(out: Path) -> None:
    """Raise ConfigError for a folder of something else."""
    require_writable("out", out)
    for entry in sorted(out.iterdir()) if out.is_dir() else ():
        if entry.name not in (DRAFTER, LOCK) and not is_leftover(entry.name):
            raise ConfigError(f"out={out} holds {entry.name}; expected a new folder, or one of this command")


def _requests(session: Session, rows: PromptRows | None, stopping: Stopping) -> Iterator[Prompt]:
    """Yield the requests; a signal while the next one is awaited ends the command at once."""
    if rows is not None:
        yield from session.prompts
        return
    limits = [context_limit(session.target.config), *(it.context_limit for it in session.drafters.values())]
    shortest = min((limit for limit in limits if limit is not None), default=None)
    prompts = arriving(json_lines("stdin", sys.stdin), session.tokenizer, shortest)
    while True:
        with stopping.at_once():
            prompt = next(prompts, None)
        if prompt is None:
            return
        yield prompt


def _answer(
    decoder: SpeculativeDecoder, session: Session, request: LiveRequest, prompt: Prompt, number: int, answers: TextIO
) -> None:
    """Write the answer to each turn of a request to `answers`."""
    chat, before = Chat(session.tokenizer, request.chat_template, processor=session.processor), list[list[int]]()
    (temperature,) = request.temperatures
    for turn in range(prompt.turns):
        asked = prompt.after(before, chat)
        settings = {"max_new_tokens": request.max_new_tokens, "temperature": temperature}
        out = decoder.generate(asked.input_ids, inputs=asked.inputs, seed=request.seed + number, **settings)
        before.append(out.tokens)
        read = [] if session.target.config.is_encoder_decoder else asked.input_ids
        line = {"id": prompt.id, "turn": turn + 1, "response": text_after(session.tokenizer, read, out.tokens)}
        numbers = {"tokens": len(out.tokens), "tau": round(out.acceptance_length, 3)}
        print(json.dumps({**line, **numbers}), file=answers, flush=True)


def _log(line: str) -> None:
    typer.echo(printable(line), err=True)
