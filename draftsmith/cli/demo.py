"""`draftsmith demo`: a page on which a prompt is decoded by the target alone and with a drafter, side by side."""

import html
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from importlib import import_module
from queue import Queue
from threading import Event, Thread
from typing import Any

from draftsmith.cli.options import measuring, suggest
from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.fastest import fastest_decoder
from draftsmith.decode.sequence import Round
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.conversation import Conversation
from draftsmith.distill.detokenize import IncrementalText
from draftsmith.errors import ConfigError, reason_of
from draftsmith.eval.baseline import fastest_threads, threads
from draftsmith.eval.session import Session, load_session
from draftsmith.eval.settings import DemoSettings, PairSettings
from draftsmith.metrics import acceptance_at, position_counts, tau
from draftsmith.terminal import printable

EXAMPLES = ("    def test_close(self):\n", "Once upon a time", "Why is speculative decoding lossless?")
MOST_TOKENS = 1024
DEFAULT = "the fastest in most measurements"
POLICIES = (
    DEFAULT,
    "chain:draft_length=4",
    "adaptive",
    "best-first:size=8,depth=4",
)
"""Policies to choose from; others may be typed."""
EVERY = 0.05
"""Seconds between two updates of the page."""
STYLE = """
.lane { white-space: pre-wrap; overflow-wrap: anywhere; font-family: monospace; font-size: 0.9rem; line-height: 1.5;
  min-height: 18rem; padding: 0.8rem; border: 1px solid var(--border-color-primary); border-radius: 6px; }
.lane .prompt { opacity: 0.55; }
.lane .drafted { background: #009E7333; border-radius: 2px; }
.speed { font-size: 1.1rem; font-weight: 600; }
.bars, .bars tr, .bars td { border: none !important; vertical-align: middle; }
.bars td { padding: 0 0.5rem 0 0 !important; }
.bars .bar { height: 0.8rem; background: #0072B2; border-radius: 2px; }
"""


Step = tuple[list[int], Round | None]
"""The tokens of a round, or of the prefill, which has no record."""


def steps(decoder: SpeculativeDecoder, prompt: list[int], cpu_threads: int, **settings: Any) -> Generator[Step]:
    """Yield the steps of a text; decoding, in a thread of its own, waits until the next step is asked for.

    Raises:
        Exception: what the decoding raised.
    """
    handed: Queue[Step | Exception | None] = Queue()
    left = Event()

    def on_tokens(tokens: list[int], record: Round | None) -> None:
        handed.put((tokens, record))
        handed.join()
        if left.is_set():
            raise InterruptedError

    def decode() -> None:
        try:
            with threads(cpu_threads):  # torch counts them by thread
                decoder.generate(prompt, on_tokens=on_tokens, **settings)
        except Exception as error:
            handed.put(error)
        handed.put(None)

    Thread(target=decode, daemon=True).start()
    try:
        while (step := handed.get()) is not None:
            if isinstance(step, Exception):
                raise step
            yield step
            handed.task_done()
    finally:
        left.set()
        handed.task_done()


class Lane:
    """A text that grows round by round: its pieces, each with whether it was drafted, and its rounds."""

    def __init__(self, text: IncrementalText, steps: Iterator[Step]) -> None:
        self._text, self._steps = text, steps
        self.pieces: list[tuple[str, bool]] = []
        self.tokens: list[int] = []
        self.rounds: list[Round] = []
        self.finished = False

    @property
    def seconds(self) -> float:
        """Seconds of all rounds, without the prefill."""
        return sum(record.seconds for record in self.rounds)

    @property
    def speed(self) -> float:
        """Tokens per second of the rounds; 0 before the first one."""
        return sum(record.committed for record in self.rounds) / self.seconds if self.rounds else 0.0

    def advance(self) -> None:
        """Decode one more round, at first the prefill."""
        step = next(self._steps, None)
        if step is None:
            self.finished = True
            self.pieces.append((self._text.rest(), False))
            return
        tokens, record = step
        self.tokens += tokens
        self.rounds += [] if record is None else [record]
        drafted = 0 if record is None else record.accepted
        self.pieces += [(self._text.add(token), place < drafted) for place, token in enumerate(tokens)]


def race(lanes: Sequence[Lane]) -> Iterator[None]:
    """Decode all texts to their ends, and yield after every round of one of them.

    The text whose rounds have taken less time so far comes next: both grow as if each had the machine for itself, and
    no round is timed while another one runs.
    """
    while running := [lane for lane in lanes if not lane.finished]:
        min(running, key=lambda lane: lane.seconds).advance()
        yield


class Demo:
    """The loaded pair, and what the page shows of it."""

    def __init__(self, settings: PairSettings, session: Session) -> None:
        self.target, self.tokenizer = session.target, session.tokenizer
        ((self.name, self.drafter),) = session.drafters.items()
        self.cpu_threads = fastest_threads(self.target, self.tokenizer(EXAMPLES[0])["input_ids"])
        with threads(self.cpu_threads):
            fastest_decoder(self.target, self.drafter)  # measures the costs of this pair once
        encodes = self.target.config.is_encoder_decoder
        self._chat = Chat(self.tokenizer, settings.chat_template, settings.template_options, encodes=encodes)

    def prompt(self, text: str, as_chat: bool) -> list[int]:
        """Return the tokens of a text, or of a user's message and the start of an answer."""
        message = Conversation("prompt", messages=[{"role": "user", "content": text}])
        return self._chat.prompt(message) if as_chat else self._chat.plain(text)

    def decode(
        self,
        text: str,
        temperature: float,
        policy: str,
        max_new_tokens: int,
        seed: int,
        as_chat: bool = False,
    ) -> Iterator[tuple[str, str, str, str]]:
        """Decode with both and yield what the page shows: the two texts, acceptance by position, and the comparison.

        Raises:
            ConfigError: for a choice that the pair does not support.
        """
        ids = self.prompt(text, as_chat)
        settings = {"temperature": temperature, "max_new_tokens": int(max_new_tokens), "seed": int(seed)}
        own = self.drafter.only_retrieves or policy == DEFAULT
        with threads(self.cpu_threads):  # policies plan with costs that depend on them
            if own:
                drafting = fastest_decoder(self.target, self.drafter)
            else:
                drafting = SpeculativeDecoder(self.target, self.drafter, policy=policy)
        texts = [
            steps(decoder, ids, self.cpu_threads, **settings) for decoder in (SpeculativeDecoder(self.target), drafting)
        ]
        lanes = [Lane(IncrementalText(self.tokenizer, ids), each) for each in texts]
        shown = time.monotonic()
        with closing(texts[0]), closing(texts[1]):
            for _ in race(lanes):
                if time.monotonic() - shown >= EVERY:
                    shown = time.monotonic()
                    yield self._page(text, lanes, temperature)
        yield self._page(text, lanes, temperature)

    def _page(self, prompt: str, lanes: list[Lane], temperature: float) -> tuple[str, str, str, str]:
        alone, drafted = lanes
        return (
            _lane(prompt, alone, "target alone"),
            _lane(prompt, drafted, self.name),
            _bars(acceptance_at([position_counts(drafted.rounds)])),
            _comparison(alone, drafted, temperature),
        )


def _lane(prompt: str, lane: Lane, name: str) -> str:
    pieces = [
        f'<span class="drafted">{_safe(piece)}</span>' if drafted else _safe(piece) for piece, drafted in lane.pieces
    ]
    mean = tau([record.committed for record in lane.rounds], len(lane.rounds))
    speed = f"{lane.speed:.0f} tokens/s, tau {mean:.2f}" if lane.rounds else "reading the prompt"
    end = " – done" if lane.finished else ""
    text = f'<span class="prompt">{_safe(prompt)}</span>{"".join(pieces)}'
    return f'<div class="speed">{_safe(name)}: {speed}{end}</div><div class="lane">{text}</div>'


def _bars(shares: list[float]) -> str:
    """Return a bar chart of acceptance by draft position."""
    rows = [
        f"<tr><td>{place}</td><td style='width:16rem'><div class='bar' style='width:{share:.0%}'></div></td>"
        f"<td>{share:.0%}</td></tr>"
        for place, share in enumerate(shares, 1)
    ]
    return f"<table class='bars'>{''.join(rows)}</table>"


def _comparison(alone: Lane, drafted: Lane, temperature: float) -> str:
    if not (alone.rounds and drafted.rounds):
        return ""
    said = f"{drafted.speed / alone.speed:.2f} times as fast as the target alone"
    if alone.finished and drafted.finished and temperature == 0:
        said += "; the texts are identical" if alone.tokens == drafted.tokens else "; the texts differ by rounding"
    elif alone.finished and drafted.finished:
        said += "; sampled texts differ, their distribution is the same"
    return f"<div class='speed'>{said}</div>"


def _safe(text: str) -> str:
    return html.escape(printable(text))


def gradio() -> Any:
    """Return the package gradio; ConfigError where it is not installed."""
    try:
        return import_module("gradio")
    except ImportError as error:
        raise ConfigError("demo needs the package gradio; expected: pip install '.[demo]' in the clone") from error


def make_page(demo: Demo) -> Any:
    """Return the page as gradio's Blocks."""
    gr = gradio()

    def decode(*choices: Any) -> Iterator[tuple[str, str, str, str]]:
        try:
            yield from demo.decode(*choices)
        except Exception as error:  # the page stays usable
            raise gr.Error(reason_of(error)) from error

    with gr.Blocks(title="draftsmith", analytics_enabled=False) as page:
        gr.Markdown(
            "# draftsmith\nOne prompt, decoded by the target alone and with a drafter, which take turns on this "
            "machine: each continues when its rounds have taken less time. The drafter's accepted tokens are green."
        )
        prompt = gr.Textbox(EXAMPLES[0], label="Prompt", lines=3, elem_id="prompt")
        with gr.Row():
            temperature = gr.Slider(0, 2, 0, step=0.1, label="Temperature")
            policy = gr.Dropdown(list(POLICIES), value=DEFAULT, label="Policy", allow_custom_value=True)
            count = gr.Slider(8, MOST_TOKENS, 128, step=8, label="Tokens")
            seed = gr.Number(0, label="Seed", precision=0, minimum=0)
            chats = bool(demo.tokenizer.chat_template)
            as_chat = gr.Checkbox(chats, label="Chat template", visible=chats)
        with gr.Row():
            start = gr.Button("Decode", variant="primary", elem_id="decode")
            stop = gr.Button("Stop")
        comparison = gr.HTML(elem_id="comparison")
        with gr.Row():
            alone, drafted = gr.HTML(elem_id="alone"), gr.HTML(elem_id="drafted")
        gr.Markdown("**Acceptance by draft position**, of the draft tokens whose predecessors were accepted")
        bars = gr.HTML(elem_id="acceptance")
        gr.Examples([[text] for text in EXAMPLES], prompt)
        choices = [prompt, temperature, policy, count, seed, as_chat]
        running = start.click(decode, choices, [alone, drafted, bars, comparison], show_progress="hidden")
        stop.click(None, cancels=[running])
    return page


def serve(settings: DemoSettings) -> None:
    """Load the target and its drafter, and serve the page until Ctrl-C."""
    theme = gradio().themes.Default(font=["sans-serif"], font_mono=["monospace"])  # none is loaded from elsewhere
    page = make_page(Demo(settings, load_session(settings, None)))
    # Printed first: the server runs until it is interrupted.
    suggest("draftsmith", *measuring("eval", settings), to_stderr=True)
    at = {"server_name": settings.host, "server_port": settings.port}
    page.launch(**at, share=False, css=STYLE, theme=theme, ssr_mode=False)
