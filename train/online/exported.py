"""`draftsmith adapt --watch`: a drafter that learns from the hidden states that an engine exports into a folder.

folder of states ──▶ whole, new files ──▶ rows ──▶ `OnlineLearning` ──▶ adopted? ──▶ a new version, and `latest`
"""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from torch import Tensor

from draftsmith.decode.sampling import Sampling, require_seed
from draftsmith.distill.load_target import DTYPES, LoadedTarget, check_target_name, load_target, load_tokenizer
from draftsmith.distill.sources import mask_spans
from draftsmith.distill.state_files import COMPARED_TEXTS, UNREADABLE, StoredLayers, StoredText, open_states
from draftsmith.errors import ConfigError, reason_of
from draftsmith.eval.teacher_forced import TargetText
from draftsmith.heads.checkpoint import describe_target, is_named, load_drafter
from draftsmith.heads.lm_head import weight_of
from draftsmith.heads.model_config import text_config
from draftsmith.heads.validation import StoredDrafter, local_folder, read_config
from draftsmith.hub.export import check_export, export_drafter, servable
from draftsmith.locks import LOCK, hold_folder
from draftsmith.storage import require_apart, require_writable
from draftsmith.train.interrupts import Stopping
from draftsmith.train.online.arrivals import Arrivals
from draftsmith.train.online.buffer import Row
from draftsmith.train.online.candidate import learnable
from draftsmith.train.online.learner import HELD_EVERY, OnlineLearning, Update
from draftsmith.train.online.versions import LATEST, Versions

# Shapes: T tokens, H hidden size, F size of the features, W = H + F numbers of a token.

JOURNAL, DRAFTER = "read.jsonl", "drafter"
"""Names of the files that were read, beside the versions; the folder of a version with draftsmith's checkpoint."""
EVERY = 128
"""Tokens for each optimizer step by default: with 8 rows of 64 tokens, each token is trained on four times."""
FREE = 1e-9
"""Cost of learning, relative to serving: it runs beside the servers, so that every adopted gain pays."""
POLL = 1.0
"""Seconds between two looks at the folder."""


@dataclass(frozen=True)
class WatchRequest:
    """Settings of `draftsmith adapt --watch`."""

    drafter: str
    folder: Path
    out: Path
    target: str | None = None
    """Default: the one that the drafter was trained for."""
    format: str | None = None
    """Layout of an engine, written beside draftsmith's own."""
    keep: int = 4
    every: int = EVERY
    temperature: float = 1.0
    """At which acceptance is compared."""
    seed: int = 0
    dtype: str = "float32"
    trust_remote_code: bool = False
    delete: bool = False
    """Delete files that were read."""
    max_minutes: float | None = None
    idle_minutes: float | None = None


def watch(request: WatchRequest, say: Callable[[str], None]) -> str:
    """Learn until a signal or a limit ends it, and return the name of the target.

    Args:
        say: called with each line of progress.

    Raises:
        ConfigError: for settings that cannot be, before anything is loaded; for a drafter that cannot learn, and states
            that are not the target's.
    """
    versions = Versions(request.out, request.keep)
    target = _checked(request, versions)
    with ExitStack() as stack:
        stack.enter_context(hold_folder("out", request.out))
        versions.mend()
        newest = versions.newest()
        if newest is not None:
            say(f"continues with {newest}")
        drafter = request.drafter if newest is None else str(newest / DRAFTER)
        loaded = load_target(target, dtype=request.dtype, trust_remote_code=request.trust_remote_code)
        run = _Watch(request, versions, loaded, drafter, say)
        run.stopping = stack.enter_context(Stopping())
        run.run()
    return target


def _checked(request: WatchRequest, versions: Versions) -> str:
    """Return the name of the target; ConfigError for settings that cannot be."""
    for key in ("keep", "every"):
        if getattr(request, key) < 1:
            raise ConfigError.of(key, getattr(request, key), ">= 1")
    for key in ("max_minutes", "idle_minutes"):
        value = getattr(request, key)
        if value is not None and not value > 0:
            raise ConfigError.of(key.replace("_", "-"), value, "> 0")
    Sampling(request.temperature)
    require_seed("seed", request.seed)
    if request.dtype not in DTYPES:
        raise ConfigError.of("dtype", request.dtype, f"one of {', '.join(DTYPES)}")
    if not request.folder.is_dir():
        raise ConfigError.of("watch", str(request.folder), "a folder, into which an engine writes hidden states")
    require_writable("out", request.out)
    require_apart("out", request.out, request.folder)
    stored = _stored(request.drafter)
    kind = None if stored is None else stored.type
    if request.format is not None:
        check_export(request.format, kind, None, request.out / "new")
    target = request.target or (None if stored is None else stored.target.name)
    if target is None:
        raise ConfigError(f"drafter={request.drafter} names no target; expected --target")
    check_target_name(target)
    versions.require_own({JOURNAL, LOCK})
    newest = versions.newest() if request.out.is_dir() else None
    known = None if newest is None else _stored(str(newest / DRAFTER))
    if known is not None and kind is not None and known.type != kind:
        raise ConfigError(
            f"out={request.out} holds versions of a {known.type} drafter; expected a new folder for {kind}"
        )
    _, config = load_tokenizer(target, trust_remote_code=request.trust_remote_code)
    if config.is_encoder_decoder:
        raise ConfigError(
            f"target={target} is an encoder-decoder, whose states engines do not export; expected another"
        )
    return target


def _stored(drafter: str) -> StoredDrafter | None:
    if is_named(drafter) and not Path(drafter).is_dir():
        raise ConfigError(f"drafter={drafter} has no weights; expected a folder or a Hub id of a trained drafter")
    return read_config(local_folder(drafter), drafter)[1]


class _Watch:
    """A drafter, its learner, and the files of a folder."""

    stopping: Stopping

    def __init__(
        self, request: WatchRequest, versions: Versions, loaded: LoadedTarget, drafter: str, say: Callable[[str], None]
    ) -> None:
        self._request, self._versions, self._loaded, self._say = request, versions, loaded, say
        vocabulary = text_config(loaded.model).vocab_size
        self._drafter = learnable(load_drafter(drafter, loaded.model, loaded.tokenizer), vocabulary)
        self._learn = OnlineLearning(share=FREE, every=request.every, seed=request.seed, on_update=self._updated)
        self._learn.attach(loaded.model, self._drafter)
        stored = _stored(drafter)
        described = None if stored is None else stored.target.model_dump()
        self._target = described or describe_target(loaded.model, loaded.tokenizer, loaded.name)
        self._recipe = None if stored is None else stored.recipe
        self._files = Arrivals(request.folder, request.out / JOURNAL)
        self._sampling = Sampling(request.temperature)
        self._layers: StoredLayers | None = None
        self._shape = weight_of(loaded.model.get_output_embeddings()).shape
        self._read = 0

    def run(self) -> None:
        """Learn from files until something ends it, and say what was learned."""
        newest = self._versions.newest()
        if newest is None or not (newest / (self._request.format or DRAFTER)).is_dir():
            self._version()
        self._say(f"watching {self._request.folder}; {self._versions.folder / LATEST} is the drafter in use")
        self._started = last = time.monotonic()
        idle = self._request.idle_minutes
        while not self._over():
            if self._turn():
                last = time.monotonic()
            elif idle is not None and time.monotonic() - last >= 60 * idle:
                break
            time.sleep(POLL)
        newest = self._versions.newest()
        assert newest is not None, "written at the start"
        failed = len(self._files.unreadable)
        self._say(f"{self._read:,} files read{f', {failed:,} unreadable' * bool(failed)}; {self._learn.summary()}")
        self._say(f"{self._versions.folder / LATEST} is {newest.name}")

    def _over(self) -> bool:
        """Return whether a signal was received, or the time is over."""
        limit = self._request.max_minutes
        expired = limit is not None and time.monotonic() - self._started >= 60 * limit
        return self.stopping.received is not None or expired

    def _turn(self) -> bool:
        """Learn from the new files; return whether one was read."""
        before = self._read
        for file in self._recognised(self._files.look()):
            text = self._opened(file)
            if text is not None and self._learned(file, text):
                self._read += 1
                self._files.done(file, delete=self._request.delete)
            if self._over():
                break
        return self._read > before

    def _recognised(self, files: list[Path]) -> list[Path]:
        """Return the files, once their layers are known."""
        if self._layers is None:
            opened = {file: text for file in files[:COMPARED_TEXTS] if (text := self._opened(file)) is not None}
            if not opened:
                return []
            counts = Counter(text.layers for text in opened.values())
            usual = max(counts, key=lambda layers: (counts[layers], layers))
            texts = [text for text in opened.values() if text.layers == usual]
            folder, layers = self._request.folder, self._drafter.needs.layers
            self._layers = StoredLayers(f"watch={folder}", self._loaded.model, layers, texts)
            self._say(f"states in {folder}: at most {self._layers.error:.2%} from the target's on a few texts")
        return [file for file in files if not self._files.refused(file)]

    def _opened(self, file: Path) -> StoredText | None:
        """Return a text without its padding; None for a file that cannot be read, which is left until it changes."""
        try:
            text = open_states(file, *self._shape)
            if self._layers is None:
                _require_finite(*text.parts)
            elif text.layers != self._layers.count:
                raise ValueError(f"{text.layers} layers instead of {self._layers.count}")
        except UNREADABLE as error:
            return self._refuse(file, reason_of(error))
        ends = [end for _, end in _spans(text)]
        return text.upto(ends[-1]) if ends else text

    def _refuse(self, file: Path, reason: str) -> None:
        self._files.refuse(file, reason)
        self._say(f"{file}: {reason}: left until it changes")

    def _learned(self, file: Path, text: StoredText) -> bool:
        """Learn from a text; False for one that holds other numbers than states, or if it is not read whole."""
        ids = text.ids_T.tolist()
        held = held_back(ids)
        for row in self._rows(ids, text):
            try:
                _require_finite(row.hidden_nH, row.features_TF)
            except ValueError as error:
                self._refuse(file, reason_of(error))
                return False
            self._learn.learn_from(row, held=held)
            if self._over():
                return False
        return True

    def _rows(self, ids: list[int], text: StoredText) -> Iterator[Row]:
        weight, reads_layers = next(self._loaded.model.parameters()), bool(self._drafter.needs.layers)

        def states(start: int, end: int) -> tuple[Tensor, Tensor | None]:
            assert self._layers is not None
            states_TW = self._layers.read(text, start, end).to(weight)
            return states_TW[:, : self._shape[1]], states_TW[:, self._shape[1] :] if reads_layers else None

        for first, end in _spans(text):
            yield from self._learn.rows_of(TargetText(ids[:end], first, end), states, self._sampling, self._read)

    def _updated(self, update: Update) -> None:
        self._say(str(update))
        if update.kind == "adopted":
            self._version()

    def _version(self) -> None:
        """Write the drafter in use as a new version."""
        self._say(f"new version: {self._versions.add(self._write)}")

    def _write(self, folder: Path) -> None:
        tokenizer, name = self._loaded.tokenizer, self._loaded.name
        self._learn.save(folder / DRAFTER, self._target, tokenizer, self._recipe)
        if self._request.format is not None:
            place = folder / self._request.format
            options = {"target_name": servable(name), "tokenizer": tokenizer}
            export_drafter(self._drafter, self._loaded.model, self._request.format, place, **options)


def held_back(ids: list[int]) -> bool:
    """Return whether a text is held back: one in `HELD_EVERY`, the same in every run and for every copy of it."""
    digest = blake2b(array("q", ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_EVERY == 0


def _require_finite(*states: Tensor | None) -> None:
    if not all(it is None or bool(it.isfinite().all()) for it in states):
        raise ValueError("states that are not finite")


def _spans(text: StoredText) -> list[list[int]]:
    """Return the spans of decoded tokens: all but the first one where the file does not say."""
    return [[1, len(text.ids_T)]] if text.mask_T is None else mask_spans(text.mask_T.tolist())
