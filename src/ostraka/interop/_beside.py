"""What lies beside the weights of a Hugging Face model, and goes along with them."""

from __future__ import annotations

import json
import re

from ostraka._source import CONFIG, Source
from ostraka.formats._safetensors_files import CONFIG_FILE, resolve
from ostraka.storage import Store

_MOST_BYTES = 256 << 20
_BESIDE = re.compile(
    r"(config|generation_config|preprocessor_config|processor_config|special_tokens_map"
    r"|added_tokens|chat_template|tokenizer|tokenizer_config|vocab)\.json"
    r"|chat_template\.jinja|merges\.txt|vocab\.txt|[\w.-]+\.(model|tiktoken)"
    r"|(README|LICENSE|NOTICE)(\.\w+)?"
)


def copy_beside(source: Source, target: Store) -> None:
    """Copy the configuration, the tokenizer and their like, as they are; none are made up.

    A checkpoint of ours that was converted from a model of Hugging Face's has the configuration in
    its metadata.
    """
    names = list(filter(_BESIDE.fullmatch, source.store.list()))
    for name in names:
        place, stored_as = resolve(source.store, name)
        target.put(name, place.get(stored_as, _MOST_BYTES))
    config = source.saved.user.get(CONFIG)
    if CONFIG_FILE not in names and isinstance(config, dict):
        target.put(CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())
