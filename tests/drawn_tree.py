"""A policy that draws trees of a given shape: the rules for drawn siblings are tested on shapes that no q decides."""

from dataclasses import dataclass
from typing import ClassVar, Self

from draftsmith.decode.draft_builder import Children, DraftBuilder, DrawChildren, Read
from draftsmith.decode.policies.base import Growing
from draftsmith.decode.verification_rules import VerifyResult
from draftsmith.heads.draft_tree import ROOT, Draft


@dataclass(frozen=True)
class DrawnTree:
    """DrawChildren the children of every node without replacement; `shape`: paths, as of a `StaticTree`."""

    learns: ClassVar[bool] = False
    shape: tuple[tuple[int, ...], ...]

    def fresh(self) -> Self:
        return self

    def grow(self, builder: DraftBuilder) -> Growing:
        level: list[tuple[int, tuple[int, ...]]] = [(ROOT, ())]
        for _ in range(builder.room):
            counts = [sum(other[:-1] == path and len(other) > 0 for other in self.shape) for _, path in level]
            level = [entry for entry, count in zip(level, counts, strict=True) if count]
            if not level:
                break
            look = yield Read([node for node, _ in level], top=max(counts) if builder.greedy else 0)
            counts = [count for count in counts if count]
            if builder.greedy:
                rows = zip(level, look.tokens, look.values, counts, strict=True)
                children: Children = [
                    [(builder.choose(node, tokens[rank]), None) for rank in range(count) if values[rank] > 0]
                    for (node, _), tokens, values, count in rows
                ]
            else:
                children = yield DrawChildren(counts)
            level = [
                (child, (*path, rank))
                for (_, path), own in zip(level, children, strict=True)
                for rank, (child, _) in enumerate(own)
            ]
        return builder.draft()

    def observe(self, builder: DraftBuilder | None, draft: Draft, result: VerifyResult) -> None:
        pass

    def __str__(self) -> str:
        return f"drawn tree {self.shape}"
