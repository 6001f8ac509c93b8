"""The questions of a data set and the stored answers of a target to them, from this process or from a server.

Answers belong to their question: they are stored as they come, by question, response and turn. After a kill, for more
responses, or for another data set with some of the questions, only what is not stored is asked.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter

from draftsmith.distill.server.answers import KEPT, Answer, AnswerJournal, NoTokens
from draftsmith.distill.turns import Asked, question_numbers
from draftsmith.provenance import fingerprint
from draftsmith.storage import writing

ANSWERS = "answers*.jsonl"
"""Files of answers in the folder of a data set, one for each process that has written."""
FEATURES = Features(
    {
        "input_ids": List(Value("int64")),
        "spans": List(List(Value("int64"))),
        "question": Value("int64"),
        "messages": Value("string"),
    }
)
"""Columns of the rows: one row a question, or several where the template renders an earlier turn differently later."""


class AnswerSource(Protocol):
    """What answers questions."""

    def target_key(self, questions: Dataset) -> str:
        """Return a key of what an answer depends on besides the question and the number of the response."""
        ...

    def add(self, asked: Asked, answer: Answer, turn: int) -> bool:
        """Append an answer and the next question; return False when the conversation is complete."""
        ...


def sampling_key(source: AnswerSource, questions: Dataset) -> str:
    """Return the cache key of the answers, from everything that they depend on except the number of responses."""
    return fingerprint([source.target_key(questions), question_numbers(questions)])


class AnsweredQuestions:
    """The conversations of a data set, with the answers that are stored so far.

    Args:
        responses: to each question.
    """

    def __init__(self, source: AnswerSource, questions: Dataset, responses: int, journal: AnswerJournal) -> None:
        self.source, self.questions, self.responses, self.journal = source, questions, responses, journal
        self.numbers = question_numbers(questions)
        self.left_out: Counter[str] = Counter()
        """Conversations that end early, by the reason."""

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield the number of every response and question, the first responses before the second ones."""
        for response in range(self.responses):
            for question in range(len(self.questions)):
                yield response, question

    def pending(self) -> list[tuple[int, int]]:
        """Return the places that are not answered to the end."""
        return [place for place in self.places() if self.replay(*place)[1] is not None]

    def copy_from(self, folder: Path, numbers: set[int] | None = None) -> None:
        """Copy answers to these questions, by default to all, from the files in a folder and in its subfolders."""
        for file in sorted({*folder.glob(ANSWERS), *folder.glob(f"*/{ANSWERS}")}):
            self.journal.copy(file, {*self.numbers} if numbers is None else numbers)

    def replay(self, response: int, question: int) -> tuple[Asked, int | None]:
        """Return a conversation with its stored answers, and the turn that is to be asked; None if it is complete."""
        row, number = self.questions[question], self.numbers[question]
        asked, turn = Asked(question, list(row["input_ids"]), row["turns"], number, row.get("images", "")), 0
        while (answer := self.journal.get((response, number, turn))) is not None:
            if not self._add(asked, answer, turn):
                return asked, None
            turn += 1
        return asked, turn

    def add(self, asked: Asked, response: int, turn: int, answer: Answer) -> int | None:
        """Store and append an answer; return the turn that is to be asked next, None for a complete conversation."""
        self.journal.add((response, asked.number, turn), answer)
        return turn + 1 if self._add(asked, answer, turn) else None

    def _add(self, asked: Asked, answer: Answer, turn: int) -> bool:
        try:
            return self.source.add(asked, answer, turn)
        except NoTokens as reason:
            self.left_out[str(reason)] += 1
            return False

    def write(self, file: Path, more: Callable[[list[Answer]], dict[str, Any]], features: Features = FEATURES) -> int:
        """Write the rows of all conversations in the order of the questions, and return their number.

        `more`: returns further columns of a row from its answers.
        """
        self.left_out.clear()
        count = 0
        with writing(file, KEPT), ArrowWriter(features=features, path=str(file)) as writer:
            for response, question in self.places():
                asked, _ = self.replay(response, question)
                turn, number = 0, self.numbers[question]
                for row in asked.rows():
                    turns = range(turn, turn + len(row["spans"]))
                    answers = [self.journal.get((response, number, turn)) for turn in turns]
                    writer.write({**row, **more([answer for answer in answers if answer is not None])})
                    turn, count = turns.stop, count + 1
            writer.finalize()
        return count
