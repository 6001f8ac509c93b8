"""Several sources of prompts: read one by one, and merged so that every stretch of rows is a mixture."""

from collections.abc import Callable, Sequence

from datasets import Dataset, concatenate_datasets

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import DataSection
from draftsmith.distill.dataset import length_statistics, read_examples
from draftsmith.errors import ConfigError
from draftsmith.provenance import fingerprint


def read_sources(
    chat: Chat, sources: Sequence[DataSection], context: int | None, report: Callable[[str], None], seed: int = 0
) -> Dataset:
    """Return the examples of all sources; of several ones `merged`, with the index of their source in `source`.

    See `read_examples` for arguments and errors. Each source is cached by itself. A row that an earlier source has is
    left out; a source with fewer rows than its share asks for leaves the counts of the others as they are.
    """
    parts = [read_examples(chat, source, context, report, seed) for source in sources]
    if len(parts) == 1:
        return parts[0]
    seen: set[str] = set()
    for number, (source, rows) in enumerate(zip(sources, parts, strict=True)):
        columns = zip(rows["input_ids"], rows["spans"], rows["turns"], rows["images"], strict=True)
        twins = [fingerprint(row) for row in columns]
        kept = [index for index, twin in enumerate(twins) if twin not in seen]
        seen.update(twins)
        if len(kept) < len(rows):
            report(f"{source.label}: {len(rows) - len(kept):,} of {len(rows):,} are in another source, too: left out")
        if not kept:
            raise ConfigError(f"data.prompts={source.label}: all rows are in other sources, too; expected other rows")
        if len(kept) < source.count:
            report(f"{source.label}: {len(kept):,} samples; its share asks for {source.count:,}")
        parts[number] = rows.select(kept).add_column("source", [number] * len(kept))
    return merged(parts)


def merged(parts: Sequence[Dataset]) -> Dataset:
    """Return the rows of all parts, each part in its order and evenly spread over the whole."""
    if len(parts) == 1:
        return parts[0]
    whole = concatenate_datasets(list(parts))
    ranks = [(index + 0.5) / len(part) for part in parts for index in range(len(part))]
    return whole.select(sorted(range(len(whole)), key=ranks.__getitem__))


def of_source(rows: Dataset, number: int) -> Dataset:
    """Return the rows of a source."""
    return rows.select([index for index, source in enumerate(rows["source"]) if source == number])


def describe(rows: Dataset) -> str:
    """Return the counts of samples and tokens as text."""
    if not len(rows):
        return "no samples"
    lengths = length_statistics(rows)
    return f"{lengths.samples:,} samples, {lengths.tokens:,} tokens, {lengths.trained:,} of them trained"
