"""`keep_best` by the name of a metric."""

from pathlib import Path

import pytest

import ostraka
from ostraka.manager._keep import check_best

NAMES = {
    **dict.fromkeys(("loss", "eval/loss", "val_loss", "Perplexity", "top1-error"), "min"),
    **dict.fromkeys(("accuracy", "eval.acc", "val_f1", "mean_reward"), "max"),
}


@pytest.mark.parametrize(("name", "mode"), NAMES.items())
def test_names_that_say_what_is_good(name: str, mode: str):
    assert check_best("keep_best", name) == ostraka.Best(name, mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["score", "accuracy_loss", "", "lossless"])
def test_names_that_do_not(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match=rf"pass Best\('{name}', 'min'\) or Best\('{name}', 'max'"):
        ostraka.Manager(tmp_path, keep_best=name)
