"""The reference of the command is what the command says of itself."""

from pathlib import Path

from cli_reference import reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def test_the_reference_is_up_to_date():
    # To write it anew: python tests/support/cli_reference.py > docs/reference/cli.md
    assert DOCUMENT.read_text("utf-8") == reference()
