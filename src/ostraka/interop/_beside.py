"""What lies beside the weights of a Hugging Face model, and goes along with them."""

from __future__ import annotations

import re

from ostraka.storage import Store

_MOST_BYTES = 256 << 20
_BESIDE = re.compile(
    r"(config|generation_config|preprocessor_config|processor_config|special_tokens_map"
    r"|added_tokens|chat_template|tokenizer|tokenizer_config|vocab)\.json"
    r"|chat_template\.jinja|merges\.txt|vocab\.txt|[\w.-]+\.(model|tiktoken)"
    r"|(README|LICENSE|NOTICE)(\.\w+)?"
)


def copy_beside(source: Store, target: Store) -> None:
    """Copy the configuration, the tokenizer and their like, as they are; none are made up."""
    there = set(target.list())
    for name in source.list():
        if _BESIDE.fullmatch(name) and name not in there:
            target.put(name, source.get(name, _MOST_BYTES))
