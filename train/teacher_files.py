"""Training rows of teachers that read files: answers with log-probabilities, and hidden states of an engine."""

from typing import NamedTuple

from datasets import Dataset

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.load_target import LoadedTarget
from draftsmith.distill.state_files import StateFiles
from draftsmith.errors import ConfigError
from draftsmith.heads.lm_head import weight_of
from draftsmith.heads.model_config import context_limit
from draftsmith.train.context import RunContext


class TeacherFiles(NamedTuple):
    """Rows and states that are read from the recipe's `teacher.file`."""

    rows: Dataset | None
    """`input_ids` and `spans`, used instead of data.prompts; None for states of texts in data.prompts."""
    states: StateFiles | None
    """None for log-probabilities, which are in the rows."""


def teacher_files(context: RunContext, chat: Chat, target: LoadedTarget) -> TeacherFiles:
    """Read the recipe's `teacher.file`; a ConfigError where nothing in it can be trained on."""
    recipe, say = context.recipe, context.console.say
    file = recipe.teacher.file
    assert file is not None, "the recipe refuses teachers of files without one"
    if recipe.teacher.kind == "logprobs":
        from draftsmith.distill.logprob_teacher import logprob_rows

        with context.accelerator.main_process_first():
            rows = logprob_rows(file, target.tokenizer, say, chat)
        return TeacherFiles(_fitting(context, target, rows), None)
    say(f"teacher: reading {file}")
    vocab_size, hidden_size = weight_of(target.model.get_output_embeddings()).shape
    states = StateFiles(file, vocab_size, hidden_size, say)
    rows = states.trained_rows()
    if rows is not None:
        return TeacherFiles(_fitting(context, target, rows), states)
    if recipe.data.response != "text":
        raise ConfigError(
            f"data.response={recipe.data.response!r} with teacher.kind='files', whose files do not say which tokens "
            "are answers; expected 'text', and the same conversations in data.prompts"
        )
    return TeacherFiles(None, states)


def _fitting(context: RunContext, target: LoadedTarget, rows: Dataset) -> Dataset:
    """Return at most `data.count` of the rows that the recipe's limits and the target's context admit."""
    data, file = context.recipe.data, context.recipe.teacher.file
    limit = context_limit(target.model.config)

    def fits(spans: list[list[int]]) -> bool:
        start, end = spans[0][0], spans[-1][1]
        room = limit is None or end <= limit
        return start <= data.prompt_tokens and end - start <= data.response_tokens and room

    kept = [index for index, spans in enumerate(rows["spans"]) if fits(spans)]
    if len(kept) < len(rows):
        most = f"data.prompt_tokens={data.prompt_tokens}, data.response_tokens={data.response_tokens} or the context"
        context.console.say(f"{file}: {len(rows) - len(kept):,} of {len(rows):,} are longer than {most}: left out")
    if not kept:
        raise ConfigError(f"teacher.file={file} leaves nothing to train on; expected at least one row that fits")
    return rows.select(kept[: data.count])
