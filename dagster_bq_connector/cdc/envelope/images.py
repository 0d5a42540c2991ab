"""Row images: JSON objects of a row's columns, parsed into one list of values a column."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec import UNSET
from msgspec.structs import astuple

from dagster_bq_connector.cdc.envelope.arrays import CHUNK

Json: TypeAlias = Any  # bytes, or a view of them

# What the decoder raises for what is no such JSON; text that is no UTF-8, and nesting too deep.
JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_SAME_NAMES = (
    "the row ('after') has two columns whose names differ in case alone, which BigQuery does not "
    "tell apart: leave one out (column.exclude.list on the connector)"
)


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
    images: Any, names: Sequence[str], known: Iterable[str], ignored: str | None = None
) -> Images:
    """Parse images.

    Args:
        images: JSON objects, as `lines` gives them.
        names: The columns that are wanted; the images' may differ from them in case.
        known: All names that the images are known to have, from their schema.
        ignored: Names that begin so are no columns.
    """
    layout = _Layout(list(names), ignored)
    for name in known:
        layout.add(name, 0)
    columns: list[list[Any]] = [[] for _ in names]
    failed: dict[int, str] = {}
    for start in range(0, len(images), CHUNK):
        chunk = images.slice(start, CHUNK)
        rows = _together(chunk, layout)
        if rows is None:
            rows = _one_by_one(chunk, start, layout, failed)
        # The columns that are wanted come first in a row, other names after them.
        for column, values in zip(columns, zip(*map(astuple, rows), strict=False), strict=False):
            column.extend(values)
    return Images([*columns], failed, layout.unknown)


def _together(images: Any, layout: _Layout) -> list[Any] | None:
    """Parse images that are right, as the lines of one text; None when one may not be."""
    _, offsets, data = images.buffers()
    first, last = np.frombuffer(offsets, np.int32)[[images.offset, images.offset + len(images)]]
    try:
        # Each image is JSON as a whole, or nothing: so they cannot run into each other.
        rows = layout.decoder().decode_lines(memoryview(data)[first:last])
    except JSON_ERRORS:
        return None
    return rows if len(rows) == len(images) else None


def _one_by_one(given: Any, first: int, layout: _Layout, failed: dict[int, str]) -> list[Any]:
    """Parse images of which some may be wrong, or have names that are not known yet.

    Args:
        given: A chunk of all images.
        first: Which of all images is the first of them.
        layout: Learns names.
        failed: Takes those that fail. In their place is a row without values.
    """
    images: list[Json] = given.to_pylist()
    rows: list[Any] = []
    left = iter(images)
    while True:
        try:
            # Rows that were parsed before one that fails stay in the list.
            rows.extend(map(layout.decoder().decode, left))
            return rows
        except JSON_ERRORS as error:
            image, number = images[len(rows)], first + len(rows)
            reason = f"the row ('after') is no JSON object of columns: {error}"
            if isinstance(error, msgspec.ValidationError) and layout.learn(image, number):
                try:
                    rows.append(layout.decoder().decode(image))
                    continue
                except msgspec.ValidationError:
                    reason = _SAME_NAMES
            failed[number] = reason
            rows.append(layout.decoder().decode(b"{}"))


@dataclass
class _Layout:
    """The names that images have."""

    names: list[str]  # as the images have them
    ignored: str | None
    others: list[str] = field(default_factory=list[str])
    unknown: dict[str, int] = field(default_factory=dict[str, int])

    def decoder(self) -> msgspec.json.Decoder[Any]:
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
def _decoder(names: tuple[str, ...], others: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    """Parses one image to a struct of the values. Names that it does not know are an error."""
    wanted = {f"c{index}": name for index, name in enumerate(names)}
    passed = {f"o{index}": name for index, name in enumerate(others)}
    fields: list[Any] = [(name, Any | msgspec.UnsetType, UNSET) for name in wanted]
    fields += [(name, msgspec.Raw | msgspec.UnsetType, UNSET) for name in passed]
    kind = msgspec.defstruct(
        "Image", fields, rename=wanted | passed, forbid_unknown_fields=True, gc=False
    )
    return msgspec.json.Decoder(kind)
