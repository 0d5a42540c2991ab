"""For the reference: a resource's field is documented by the `description` of its `Field(...)`."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class FieldDescriptions(griffe.Extension):
    """Puts the description and the default where the reference looks for them."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Called for each attribute that griffe meets."""
        call = attr.value
        if not isinstance(call, griffe.ExprCall) or str(call.function) != "Field":
            return
        given = {a.name: a.value for a in call.arguments if isinstance(a, griffe.ExprKeyword)}
        if "description" in given and attr.docstring is None:
            attr.docstring = griffe.Docstring(
                ast.literal_eval(str(given["description"])), parent=attr
            )
        attr.value = given.get("default")
