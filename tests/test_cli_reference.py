"""The reference of the command is what the command says of itself."""

from pathlib import Path

from ostraka.cli._reference import reference

DOCUMENT = Path(__file__).parents[1] / "docs" / "cli.md"


def test_the_reference_is_up_to_date():
    # To write it anew: python -m ostraka.cli._reference > docs/cli.md
    assert DOCUMENT.read_text("utf-8") == reference()
