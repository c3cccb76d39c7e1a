"""The options of Orbax's CheckpointManager, and what Ostraka calls them."""

from __future__ import annotations

_WHEN = "say when to save with every=, every_s=, at= or when="
_KEEP = "say which steps to keep with keep=, keep_every=, keep_every_s=, keep_best= or keep_if="
_ONE_TREE = "pass one tree with everything in it to save, it needs no handlers"
_ALWAYS = "leave it out, Ostraka always does this"
_LIKE = "pass the template as like=, or into= to restore in place"

MANAGER = {
    "async_options": "leave it out, or pass asynchronous=False to save in the foreground",
    "best_fn": 'name the metric: keep_best=ostraka.Best("loss", "min")',
    "best_mode": 'it belongs to the metric: keep_best=ostraka.Best("loss", "min")',
    "checkpointers": _ONE_TREE,
    "cleanup_tmp_directories": _ALWAYS,
    "create": _ALWAYS,
    "enable_async_checkpointing": "Ostraka calls it asynchronous=",
    "item_handlers": _ONE_TREE,
    "item_names": _ONE_TREE,
    "keep_period": "Ostraka calls it keep_every=",
    "keep_time_interval": "Ostraka calls it keep_every_s=, in seconds",
    "max_to_keep": "Ostraka calls it keep=",
    "options": f"pass its fields as arguments: {_WHEN}; {_KEEP}",
    "preservation_policy": _KEEP,
    "save_decision_policy": _WHEN,
    "save_interval_steps": "Ostraka calls it every=",
    "save_on_steps": "Ostraka calls it at=",
    "should_save_fn": "Ostraka calls it when=",
    "step_prefix": "leave it out: steps are named step_00000100, and other names are read as well",
}
SAVE = {
    "args": "pass the tree: save(step, tree)",
    "custom_metadata": "Ostraka calls it metadata=",
    "items": "pass the tree: save(step, tree)",
    "save_kwargs": "pass the options of save themselves, such as dtype= and compress=",
}
RESTORE = {
    "args": _LIKE,
    "directory": "open a Manager of that directory, or call ostraka.restore(path)",
    "items": _LIKE,
    "restore_kwargs": _LIKE,
}
