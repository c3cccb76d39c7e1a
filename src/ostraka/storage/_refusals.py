"""Errors of object stores as sentences with a remedy. No other module reads their texts."""

from __future__ import annotations

import errno
import re

from ostraka.errors import StoreError, without_secrets

# The first that fits counts: a missing credential may also show as a refused connection.
_KNOWN = (
    (
        r"169\.254\.(169\.254|170\.2)|metadata\.google\.internal|[Nn]o credential|Missing[AS]",
        errno.EACCES,
        "no credentials were found; set {credentials}",
    ),
    (
        "NoSuchBucket|InvalidBucketName|ContainerNotFound|[Bb]ucket does not exist",
        errno.ENOENT,
        "there is no such bucket; create it, or correct the path",
    ),
    (
        "PermanentRedirect|AuthorizationHeaderMalformed|configured region|301 Moved",
        errno.EINVAL,
        "the bucket is in another region; set AWS_REGION to the region of the bucket",
    ),
    (
        "ExpiredToken|TokenRefreshRequired|RequestExpired|token (has )?expired|TimeTooSkewed",
        errno.EACCES,
        "the credentials have expired, or this machine's clock is wrong; renew them",
    ),
    (
        "InvalidAccessKeyId|SignatureDoesNotMatch|AuthenticationFailed|InvalidToken|401 Unauth",
        errno.EACCES,
        "the store does not know these credentials; check the key and the secret",
    ),
    (
        "403 Forbidden|AccessDenied|AuthorizationPermissionMismatch|necessary privileges",
        errno.EACCES,
        "no permission; the credentials must allow to list, read, write and delete there",
    ),
    (
        "NoSuchUpload",
        errno.ESTALE,
        "another save, or a rule of the bucket, has discarded the upload; save again",
    ),
    (
        "404 Not Found|405 Method Not Allowed|ETag Header missing|invalid list response",
        errno.EPROTO,
        "the server at this endpoint does not speak the API of {kind}; check it, and the bucket",
    ),
    (
        "407 Proxy",
        errno.EACCES,
        "a proxy on the way asks for credentials; check HTTP_PROXY and HTTPS_PROXY, or NO_PROXY",
    ),
    (
        "dns error|[Cc]onnection refused|error sending request|tcp connect",
        errno.EHOSTUNREACH,
        "the store can't be reached; check the endpoint and the network",
    ),
)
"""By the pattern of a text: the error number, and the sentence for it."""
_NO_BUCKET = _KNOWN[1][0]
_AWS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
_AZURE = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
_CREDENTIALS = {
    "s3": _AWS,
    "s3a": _AWS,
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or log in with gcloud",
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
}
_APIS = {
    **dict.fromkeys(("s3", "s3a"), "S3"),
    "gs": "Google Cloud Storage",
    **dict.fromkeys(("az", "abfs", "abfss"), "Azure's blob storage"),
}
_STATUS = re.compile(r"status code: (\d{3})")
_CONNECT = re.compile(r"Error\(\s*Connect,")
"""In the text of obstore's errors: of a connection that was not made, in time or at all."""
_TEMPORARY = ("408", "429")


def refusal(action: str, path: str, error: Exception) -> StoreError:
    """The sentence for what a store said.

    Never EIO: that would be a lost file, and a server in trouble has lost nothing. The error itself
    will be shown as the cause: what is secret in it is taken out.
    """
    redact(error)
    text = str(error)
    known = next((known for known in _KNOWN if re.search(known[0], text)), None)
    if known is not None:
        _, number, sentence = known
        credentials = _CREDENTIALS.get(path.partition(":")[0], "what the store's own tools expect")
        kind = _APIS.get(path.partition(":")[0], "an object store")
        sentence = sentence.format(credentials=credentials, kind=kind)
    elif is_transient(error):
        number = errno.EAGAIN
        sentence = f"the store is overloaded or in trouble, try again later; it said: {_said(text)}"
    else:
        number, sentence = errno.EPROTO, _said(text)
    return StoreError(f"can't {action} {path}: {sentence}", errno=number)


def redact(error: Exception) -> None:
    """Take out of an error's text what is secret: its URL may have it, of a request or endpoint."""
    error.args = tuple(without_secrets(a) if isinstance(a, str) else a for a in error.args)


def is_missing(error: Exception) -> bool:
    """Return True if there is no such object in a bucket that is there."""
    return isinstance(error, FileNotFoundError) and not re.search(_NO_BUCKET, str(error))


def is_past_the_end(error: Exception) -> bool:
    """Return True if a range begins behind the end of an object."""
    return "416 " in str(error) or "Wanted range starting at" in str(error)


def is_transient(error: Exception) -> bool:
    """Return True if the same may work a moment later."""
    text = str(error)
    status = _STATUS.search(text)
    if status is not None:
        return status[1].startswith("5") or status[1] in _TEMPORARY
    return not any(re.search(pattern, text) for pattern, *_ in _KNOWN[:-1])


def never_connected(error: Exception) -> bool:
    """Return True if there was no connection: no such host, no such port, no TLS."""
    return _CONNECT.search(str(error)) is not None


def broke_off(error: Exception) -> bool:
    """Return True if an answer came in part: then obstore does not ask again."""
    return "response body" in str(error) or "body from connection" in str(error)


def _said(text: str) -> str:
    """Return the text of the store, or that of the client if the store said nothing."""
    text = text.partition("Server returned non-2xx ")[2] or text
    return re.sub(r"\s+", " ", text.split("\n\nDebug source")[0])[:300]
