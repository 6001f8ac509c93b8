"""What a tracker shows of an evaluation beside its curves: acceptance by position, and texts with their authors."""

import html
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from draftsmith.decode.output import DecodeOutput
from draftsmith.distill.detokenize import IncrementalText
from draftsmith.safe_text import printable

LEGEND = "Bold: draft tokens that the target accepted; the rest is the target's own."


@dataclass(frozen=True)
class Sample:
    """A decoded text: its prompt, and its pieces with whether the drafter wrote them."""

    prompt: str
    pieces: list[tuple[str, bool]]

    @classmethod
    def of(cls, output: DecodeOutput, tokenizer: Any) -> "Sample":
        """Neighbouring tokens of one author are one piece, so that characters of several tokens stay whole."""
        text = IncrementalText(tokenizer, output.prompt_tokens, skip_special_tokens=False)
        pieces: list[tuple[str, bool]] = []
        for token, drafted in zip(output.tokens, output.drafted, strict=True):
            before = pieces.pop()[0] if pieces and pieces[-1][1] == drafted else ""
            pieces.append((before + printable(text.add(token)), drafted))
        pieces[-1] = (pieces[-1][0] + printable(text.rest()), pieces[-1][1])
        return cls(printable(tokenizer.decode(output.prompt_tokens)), pieces)

    def markdown(self) -> str:
        """For tensorboard."""
        marked = "".join(f"<b>{html.escape(text)}</b>" if ours else html.escape(text) for text, ours in self.pieces)
        return f"{LEGEND}\n\n<pre>{html.escape(self.prompt)}│{marked}</pre>"

    def html(self) -> str:
        """For wandb."""
        marked = "".join(
            f"<b style='background:#cdebdc;color:#000'>{html.escape(text)}</b>" if ours else html.escape(text)
            for text, ours in self.pieces
        )
        return (
            f"<p style='font-family:sans-serif'>{LEGEND}</p><pre style='white-space:pre-wrap'>"
            f"<span style='color:#777'>{html.escape(self.prompt)}</span>{marked}</pre>"
        )


def acceptance_chart(acceptance_at: list[float], title: str) -> np.ndarray:
    """An image [height, width, 3] of bytes: for each draft position the share accepted, given those before it."""
    figure = Figure(figsize=(4.5, 3), dpi=100, layout="tight")
    canvas, axis = FigureCanvasAgg(figure), figure.subplots()
    places = range(1, len(acceptance_at) + 1)
    axis.bar_label(axis.bar(places, acceptance_at, color="#0072b2", width=0.7), fmt="%.2f", fontsize=8)
    axis.set(xlabel="draft position", ylabel="accepted, given those before", ylim=(0, 1.1), title=title)
    axis.set_xticks(list(places))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
