"""Show the `Example:` of a docstring as code."""

import re
from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Renames the section as the parser of docstrings expects it."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Change the docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE
            )
