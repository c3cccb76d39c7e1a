"""From a URL to the bucket that it names, with the credentials that the store's own tools use.

obstore itself reads the environment (AWS_…, GOOGLE_…, AZURE_…), the files of Google's tools, and
what machines in a cloud are told. Profiles in the files of Amazon's tools are read by boto3.
"""

from __future__ import annotations

import errno
import json
import os
import re
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from obstore.store import S3Store, from_url

from ostraka.errors import StoreError
from ostraka.storage._object import Contact, ObjectStore
from ostraka.storage._refusals import refusal

_RETRY: dict[str, Any] = {
    "max_retries": 1_000,  # The time decides: 20 may be over after 6 s, as the pauses are random.
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"max_backoff": timedelta(seconds=5)},
}
_AT_FIRST = {"retry_timeout": timedelta(seconds=5)}
_NO_KEY = re.compile(r"[\x00-\x1f\x7f]")
_CLIENT = {"connect_timeout": "5s", "timeout": "60s"}


def open_url(url: str) -> ObjectStore:
    """The store that a URL names. Nothing is asked of the network yet."""
    parts = urlsplit(url)
    if (
        parts.query
        or parts.fragment
        or parts.password is not None
        or (parts.username is not None and not parts.scheme.startswith("abfs"))
    ):
        raise ValueError(
            f"a checkpoint's path has the bucket and a prefix only, as in {parts.scheme}://bucket/"
            "run, without ?, # or @; credentials and endpoints come from the environment"
        )
    if not parts.netloc:
        raise ValueError(f"{url} names no bucket; expected {parts.scheme}://bucket/prefix")
    if _NO_KEY.search(url):  # Not `parts`: it leaves out line breaks and tabs.
        raise ValueError(f"{url!r} can't be a path in a bucket: it has a control character in it")
    if not {"", ".", ".."}.isdisjoint(parts.path.strip("/").split("/")) and parts.path.strip("/"):
        raise ValueError(
            f"{url!r} can't be a path in a bucket: a part of it is empty, '.' or '..'; there are "
            "no directories in a bucket that these would lead to"
        )
    if "\\" in url:
        raise ValueError(f"{url!r} has a backslash, which some stores take for '/'; write '/'")
    root = f"{parts.scheme}://{parts.netloc}"
    start = {"s3": "AWS_", "s3a": "AWS_", "gs": "GOOGLE_"}.get(parts.scheme, "AZURE_")
    # The part of the environment that decides which store it is.
    settings = tuple(sorted(item for item in os.environ.items() if item[0].startswith(start)))
    contact = _open_bucket(root, settings)
    discard = partial(_discard_uploads, contact.lasting)
    return ObjectStore(contact, root, parts.path, discard, is_named=True)


def open_bucket(bucket: Any) -> ObjectStore:
    """The same for a store of obstore's."""
    config = dict(getattr(bucket, "config", None) or {})
    name = next((config[key] for key in ("bucket", "container_name") if key in config), None)
    kind = type(bucket).__name__
    scheme = {"S3Store": "s3", "GCSStore": "gs", "AzureStore": "az"}.get(kind)
    prefix = str(getattr(bucket, "prefix", None) or "").strip("/")
    url = f"{scheme}://{name}" if scheme and name else f"{kind}://"
    name = f"{url}/{prefix}" if prefix else url
    return ObjectStore(Contact(bucket), name, "", partial(_discard_uploads, bucket), is_named=False)


@lru_cache(maxsize=32)
def _open_bucket(root: str, settings: tuple[tuple[str, str], ...]) -> Contact:
    """Opened once for the same settings, so that connections are used again."""
    options: dict[str, Any] = {"retry_config": _RETRY, "client_options": dict(_CLIENT)}
    environment = dict(settings)
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    if root.startswith("s3"):
        if not _AWS_OWN & environment.keys() and _has_aws_files(environment):
            options |= _from_aws_files(environment)
        if endpoint:
            options["endpoint"] = endpoint
    account = _google_account(environment) if root.startswith("gs") else {}
    endpoint = (
        options.get("endpoint")
        or environment.get("AZURE_STORAGE_ENDPOINT")
        or environment.get("GOOGLE_BASE_URL")
        or account.get("gcs_base_url")
    )
    _check_endpoint(root, endpoint)
    if endpoint and endpoint.startswith("http://"):
        options["client_options"]["allow_http"] = True
    elif root.startswith("s3") and "AWS_UNSIGNED_PAYLOAD" not in environment:
        # TLS protects the bytes already: signing them, too, costs a core for 1.5 GB/s.
        options["unsigned_payload"] = True
    try:
        lasting = from_url(root, **options)
        options["retry_config"] = _RETRY | _AT_FIRST
        contact = Contact(lasting, first=from_url(root, **options))
        contact.can_sign &= not account.get("disable_oauth")  # It would ask Google for a key.
        return contact
    except Exception as error:
        raise refusal("open", root, error) from error


def _google_account(environment: dict[str, str]) -> dict[str, Any]:
    """Return what the file of a Google service account says, or nothing without such a file."""
    try:
        text = environment.get("GOOGLE_SERVICE_ACCOUNT_KEY") or Path(
            environment.get("GOOGLE_SERVICE_ACCOUNT")
            or environment.get("GOOGLE_SERVICE_ACCOUNT_PATH", "")
        ).read_text(encoding="utf-8")
        found: Any = json.loads(text)
    except (OSError, ValueError):
        return {}  # obstore says what is wrong with it.
    return found if isinstance(found, dict) else {}


def _check_endpoint(root: str, endpoint: str | None) -> None:
    """Refuse what is no URL: obstore would panic, and its text repeat the password in it."""
    try:
        parts = urlsplit(endpoint or "http://host")
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return
    except ValueError:  # of a port that is no number
        pass
    raise StoreError(
        f"can't open {root}: the endpoint in the environment or in a profile is no URL such as "
        "https://host:9000; correct it",
        errno=errno.EINVAL,
    )


_AWS_OWN = {
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
}
"""With any of these, obstore finds the credentials without files."""


def _has_aws_files(environment: dict[str, str]) -> bool:
    home = Path.home() / ".aws"
    files = (
        environment.get("AWS_SHARED_CREDENTIALS_FILE", home / "credentials"),
        environment.get("AWS_CONFIG_FILE", home / "config"),
    )
    return "AWS_PROFILE" in environment or any(Path(file).is_file() for file in files)


def _from_aws_files(environment: dict[str, str]) -> dict[str, Any]:
    """Return the settings of the profile in the files of Amazon's tools."""
    try:
        import boto3
        import botocore.session
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise StoreError(
            "profiles in Amazon's files are read by boto3, which is not installed: "
            "pip install obstore boto3"
        ) from error
    session = botocore.session.Session()
    try:
        credentials = session.get_credentials()
    except BotoCoreError as error:
        profile = environment.get("AWS_PROFILE", "default")
        raise StoreError(
            f"can't read the profile {profile!r} in Amazon's files: {error}; correct AWS_PROFILE "
            "or the files in ~/.aws",
            errno=errno.EACCES,
        ) from error
    if credentials is None:
        return {}
    found: dict[str, Any] = {
        "credential_provider": Boto3CredentialProvider(boto3.Session(botocore_session=session))
    }
    if endpoint := session.get_scoped_config().get("endpoint_url"):
        found["endpoint"] = endpoint
    region = session.get_config_variable("region")
    if region and "AWS_REGION" not in environment:
        found["region"] = region
    return found


def _discard_uploads(bucket: Any, prefix: str) -> None:
    """Only for S3, by boto3: obstore has no verb for it. docs/howto/buckets.md has the others."""
    if not isinstance(bucket, S3Store):
        return
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        return  # Incomplete uploads are invisible, and a lifecycle rule removes them.
    config: dict[str, Any] = dict(bucket.config)
    given: Any = config if bucket.credential_provider is None else bucket.credential_provider()
    name = config["bucket"]
    whole = f"{bucket.prefix}/{prefix}" if bucket.prefix else prefix
    try:
        client: Any = boto3.client(
            "s3",
            endpoint_url=config.get("endpoint"),
            region_name=config.get("region"),
            # Without them, boto3 finds what obstore has found.
            aws_access_key_id=given.get("access_key_id"),
            aws_secret_access_key=given.get("secret_access_key"),
            aws_session_token=given.get("token"),
        )
        pages = client.get_paginator("list_multipart_uploads")
        for page in pages.paginate(Bucket=name, Prefix=str(whole)):
            for upload in page.get("Uploads", ()):
                client.abort_multipart_upload(
                    Bucket=name, Key=upload["Key"], UploadId=upload["UploadId"]
                )
    except (BotoCoreError, ClientError) as error:
        raise refusal("discard uploads to", f"s3://{name}/{whole}", error) from error
