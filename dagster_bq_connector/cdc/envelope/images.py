"""Row images: JSON objects of a row's columns, parsed into one list of values a column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET

Json: TypeAlias = Any  # bytes, or a view of them

# What the decoder raises for what is no such JSON; text that is no UTF-8, and nesting too deep.
JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@dataclass
class Images:
    """Parsed images.

    Attributes:
        columns: Of each column that was asked for, the value in each image; UNSET where the image
            lacks it, or failed.
        failed: What is wrong with an image, by its index.
        unknown: Other names in the images, each with the first image that has it.
    """

    columns: list[Sequence[Any]]
    failed: dict[int, str] = field(default_factory=dict[int, str])
    unknown: dict[str, int] = field(default_factory=dict[str, int])


def parse(
    images: Sequence[Json], names: Sequence[str], known: Iterable[str], ignored: str | None = None
) -> Images:
    """Parse images.

    Args:
        images: JSON objects.
        names: The columns that are wanted; the images' may differ from them in case.
        known: All names that the images are known to have, from their schema.
        ignored: Names that begin so are no columns.
    """
    layout = _Layout(list(names), ignored)
    for name in known:
        layout.add(name, 0)
    rows: list[Any] = []
    failed: dict[int, str] = {}
    left = iter(images)
    while True:
        try:
            # Rows that were parsed before one that fails stay in the list.
            rows.extend(map(layout.decoder(), left))
            break
        except JSON_ERRORS as error:
            number = len(rows)
            if isinstance(error, msgspec.ValidationError) and layout.learn(images[number], number):
                rows.append(layout.decoder()(images[number]))
            else:
                failed[number] = f"the row ('after') is no JSON object of columns: {error}"
                rows.append(layout.decoder()(b"{}"))
    columns: list[Sequence[Any]] = [
        list(map(attrgetter(f"c{index}"), rows)) for index in range(len(names))
    ]
    return Images(columns, failed, layout.unknown)


@dataclass
class _Layout:
    """The names that images have."""

    names: list[str]  # as the images have them
    ignored: str | None
    others: list[str] = field(default_factory=list[str])
    unknown: dict[str, int] = field(default_factory=dict[str, int])

    def decoder(self) -> Callable[[Json], Any]:
        return _decoder(tuple(self.names), tuple(self.others))

    def learn(self, image: Json, number: int) -> bool:
        """Take note of names that were not known. Whether there are any."""
        try:
            found = msgspec.json.decode(image)
        except JSON_ERRORS:
            return False
        given = list(found) if isinstance(found, dict) else []
        return sum(self.add(str(name), number) for name in given) > 0

    def add(self, name: str, number: int) -> bool:
        """Whether the name was not known."""
        if name in self.names or name in self.others:
            return False
        folded = [other.casefold() for other in self.names]
        if name.casefold() in folded:
            self.names[folded.index(name.casefold())] = name
            return True
        self.others.append(name)
        if self.ignored is None or not name.startswith(self.ignored):
            self.unknown[name] = number
        return True


@lru_cache(maxsize=1_000)
def _decoder(names: tuple[str, ...], others: tuple[str, ...]) -> Callable[[Json], Any]:
    """Parses one image to a struct of the values. Names that it does not know are an error."""
    wanted = {f"c{index}": name for index, name in enumerate(names)}
    passed = {f"o{index}": name for index, name in enumerate(others)}
    fields: list[Any] = [(name, Any | msgspec.UnsetType, UNSET) for name in wanted]
    fields += [(name, msgspec.Raw | msgspec.UnsetType, UNSET) for name in passed]
    kind = msgspec.defstruct(
        "Image", fields, rename=wanted | passed, forbid_unknown_fields=True, gc=False
    )
    return msgspec.json.Decoder(kind).decode
