"""A `config.json` of Hugging Face, read as `transformers` reads it. No JAX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

_MOST = 10_000_000
"""A larger number is probably a mistake, and a plan for it would take too long."""


@dataclass(frozen=True, slots=True)
class Config:
    """The fields of a config, with the defaults of its family for those that it leaves out."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def get(self, name: str) -> Any:
        """The value of a field. Null becomes None, and no default replaces it."""
        return self.values[name] if name in self.values else self.defaults.get(name)

    def number(self, name: str, null: int | None = None, *, least: int = 1) -> int:
        """A count. `null` is the value to use for null, if null is allowed."""
        found = self.get(name)
        if found is None and null is not None:
            return null
        if type(found) is not int or not least <= found <= _MOST:
            kind = "a positive integer" if least else "an integer, zero or more"
            self._refuse(name, f"{kind}, at most {_MOST:,}")
        return found

    def flag(self, name: str) -> bool:
        """A boolean. Null is false."""
        found = self.get(name)
        if found is not None and type(found) is not bool:
            self._refuse(name, "true or false")
        return bool(found)

    def numbers(self, name: str) -> list[int]:
        """A list of integers. Null is an empty one."""
        found = self.get(name)
        listed = cast("list[Any]", found) if isinstance(found, list) else []
        if (found is not None and listed is not found) or any(type(n) is not int for n in listed):
            self._refuse(name, "a list of integers")
        return listed

    def section(self, name: str) -> Mapping[str, Any]:
        """A config within the config. Null is an empty one."""
        found = self.get(name)
        if found is not None and not isinstance(found, dict):
            self._refuse(name, "a JSON object")
        return cast("dict[str, Any]", found or {})

    def _refuse(self, name: str, kind: str) -> NoReturn:
        value = self.get(name)
        shown = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
        raise ValueError(f"the config has {shown} as its {name!r}; it must be {kind}")


def decoder_sizes(
    layers: int, width: int, hidden: int, heads: int, grouped: int | None, vocabulary: int
) -> dict[str, Any]:
    """The fields that the config of every decoder has."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": grouped,
        "vocab_size": vocabulary,
    }
