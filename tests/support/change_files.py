"""Change events in files: what a stream of the tests' own reads."""

import json
from pathlib import Path
from typing import Any

from support.debezium import event


class ChangeFiles:
    """A folder of change events of a table with the columns id and name."""

    def __init__(self, folder: Path, table: str = "orders") -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.table = folder, table
        self._files = 0
        self.lsn = 100

    def put(self, *events: tuple[str, int, str | None], **more: Any) -> None:
        """Events as (operation, id, name), in a file that comes after the others."""
        lines: list[str] = []
        for operation, id_, name in events:
            self.lsn += 1
            row = None if operation == "d" else {"id": id_, "name": name}
            value = event(operation, row, self.lsn, self.lsn - 1, self.table, **more)
            topic = f"shop.public.{self.table}"
            lines.append(json.dumps({"topic": topic, "key": {"id": id_}, "value": value}))
        self.put_lines(*lines)

    def put_lines(self, *lines: str) -> None:
        """Lines as they are."""
        file = self.folder / f"{self._files:06}.ndjson"
        partial = file.with_suffix(".part")
        partial.write_text("".join(f"{line}\n" for line in lines))
        partial.rename(file)
        self._files += 1
