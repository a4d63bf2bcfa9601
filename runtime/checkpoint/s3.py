"""Lets Orbax use s3://, by private parts read in Orbax 0.12.8; no other file of the runtime uses one.

TensorStore, which writes the arrays, has a driver for S3; Orbax gives it only paths and gs://
(https://github.com/google/orbax/issues/359). Three functions are extended, so that s3:// is handled like gs://. If a
release drops a name, or supports s3:// itself:

    gcs_utils, tensorstore_utils      Orbax's own support for S3, or none: then s3:// is refused, and gs:// stays
"""

import os
from functools import cache
from typing import Any

from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from meshloom.compiler.core.errors import ConfigError, Problem

SCHEME = "s3://"
EXTENDED = ((tensorstore_utils, "_use_gcs_driver"), (tensorstore_utils, "_normalize_path"),
            (gcs_utils, "get_kvstore_for_gcs"))  # fmt: skip


@cache
def teach_orbax_s3() -> None:
    """Makes Orbax read and write s3://. Raises ConfigError for an Orbax that has other functions."""
    if missing := [name for module, name in EXTENDED if not hasattr(module, name)]:
        what = f"this version of orbax-checkpoint cannot be extended to s3://: it has no {', '.join(missing)}"
        raise ConfigError([Problem("checkpoint", what, "use orbax-checkpoint 0.12.8, or a path or gs://")])
    uses_driver, normalized, kvstore = (getattr(module, name) for module, name in EXTENDED)
    replaced = (
        lambda directory: directory.startswith(SCHEME) or uses_driver(directory),
        lambda path: normalized(path).replace("s3:/", SCHEME),
        lambda path: s3_kvstore(path) if path.startswith(SCHEME) else kvstore(path),
    )
    for (module, name), function in zip(EXTENDED, replaced, strict=True):
        setattr(module, name, function)


def s3_kvstore(url: str) -> dict[str, Any]:
    """Returns TensorStore's spec of a URL (https://google.github.io/tensorstore/kvstore/s3), from the same environment
    variables as botocore, which reads the other files."""
    bucket, _, path = url.removeprefix(SCHEME).partition("/")
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:  # not Amazon's: TensorStore cannot ask it for the region
        spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or "us-east-1"}
    elif region:
        spec |= {"aws_region": region}
    if os.environ.get("AWS_ACCESS_KEY_ID"):  # else AWS's library warns about each missing profile
        spec |= {"aws_credentials": {"type": "environment"}}
    return spec
