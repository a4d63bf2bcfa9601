"""Names of jobs: short enough for every engine, and the same for the same run."""

import hashlib
import json
import re
from typing import Any

# Kubernetes allows 63 characters for a pod's name, which JobSet makes from the job's: NAME-hosts-SLICE-HOST-abcde, with
# up to 3 digits for the slice and 4 for the host. xpk allows 40 for a workload.
MOST_CHARACTERS = 40
NUM_DIGITS = 6  # of the hash


def job_name(label: str, declaration: Any) -> str:
    """Returns the name of a run: ("Llama 3 8B, v5p", {...}) -> "llama-3-8b-v5p-1f2e3d". It is a DNS label that begins
    with a letter, as Kubernetes asks for.

    declaration: JSON values that two runs have in common only if they are the same run.
    """
    digest = hashlib.sha256(json.dumps(declaration, sort_keys=True).encode()).hexdigest()[:NUM_DIGITS]
    words = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
    words = words if words[:1].isalpha() else f"run-{words}"
    return f"{words[: MOST_CHARACTERS - NUM_DIGITS - 1].strip('-')}-{digest}"
