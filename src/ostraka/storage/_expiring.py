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
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from http.client import HTTPException
from typing import Any

import obstore

from ostraka.common.threads import StopSignal, run_all

_AT_ONCE = 16
_TIMEOUT_S = 30.0
_NO_ANSWER = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of the store to one deletion."""

    status: int
    text: str

    @property
    def is_gone(self) -> bool:
        """Return True if the object is not there any more."""
        return 200 <= self.status < 300 or self.status == 404

    @property
    def is_other_version(self) -> bool:
        """Return True if the object has other bytes than the request names, or is gone."""
        return self.status == 412

    @property
    def knows_no_condition(self) -> bool:
        """Return True if the store has no conditional deletions."""
        return self.status == 501

    @property
    def is_refused(self) -> bool:
        """Return True if the URL has expired, or the credentials don't allow it."""
        return 400 <= self.status < 500 and self.status not in (408, 429)

    @property
    def was_given(self) -> bool:
        """Return True if there was an answer at all."""
        return self.status != _NO_ANSWER


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


def send(urls: Sequence[str], e_tag: str | None) -> list[Answer]:
    """Send deletions. With an `e_tag`, only an object that has it is deleted."""
    headers = {} if e_tag is None else {"If-Match": e_tag}
    return run_all(partial(_send, headers=headers), urls, threads=_AT_ONCE, stop=StopSignal())


def _send(url: str, headers: dict[str, str]) -> Answer:
    request = urllib.request.Request(url, method="DELETE", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return Answer(answer.status, "")
    except urllib.error.HTTPError as error:
        with error:
            body = error.read(1000).decode(errors="replace")
            return Answer(error.code, f"status code: {error.code} {error.reason}: {body}")
    except (OSError, HTTPException) as error:
        return Answer(_NO_ANSWER, f"error sending request: {error}")
