"""Columns of texts that repeat. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ostraka.report.schema import Coded


def encode_texts(texts: Iterable[str | None]) -> Coded:
    """A column of texts as the distinct texts and a number for each row, -1 for None."""
    numbers: dict[str, int] = {}
    codes = [-1 if text is None else numbers.setdefault(text, len(numbers)) for text in texts]
    return {"texts": list(numbers), "codes": codes}
