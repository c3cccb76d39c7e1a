"""Deletions in a bucket that the bucket itself refuses after some time.

A signed URL has a time after which the store refuses it, by its own clock. So a process may stand
still at any moment before it sends one: it deletes in time, or not at all. Amazon, Google and Azure
document this, and SeaweedFS and MinIO do the same.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from http.client import HTTPException
from typing import Any

import obstore

from ostraka.common.threads import StopSignal, run_all

_AT_ONCE = 16
_TIMEOUT_S = 30.0
OTHER_VERSION = 412
"""The status for an object that has other bytes than the request names, or is gone."""
NO_CONDITIONS = 501
"""The status of a store without conditional deletions."""


def is_gone(status: int) -> bool:
    """Return True if the object of a deletion with this answer is not there any more."""
    return 200 <= status < 300 or status == 404


def sign(bucket: Any, keys: Sequence[str], until_s: float) -> Sequence[str]:
    """Return URLs that delete keys until a time of the store's clock, or none after that time.

    Raises what obstore does if it can't sign.
    """
    while True:
        now_s = time.time()
        lifetime_s = int(until_s - now_s)
        if lifetime_s < 1:
            return []
        # It begins now, by this machine's clock: wherever that is, `until_s` is the end.
        urls = obstore.sign(bucket, "DELETE", list(keys), timedelta(seconds=lifetime_s))
        if 0 <= time.time() - now_s < 1:  # Else the clock was set, or this process stood still.
            return urls


def send(urls: Sequence[str], e_tag: str | None) -> list[int]:
    """Send deletions. Returns the status of each answer, 0 if there was none.

    With an `e_tag`, only an object that has it is deleted.
    """
    headers = {} if e_tag is None else {"If-Match": e_tag}
    return run_all(partial(_send, headers=headers), urls, threads=_AT_ONCE, stop=StopSignal())


def _send(url: str, headers: dict[str, str]) -> int:
    request = urllib.request.Request(url, method="DELETE", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except (OSError, HTTPException):
        return 0
