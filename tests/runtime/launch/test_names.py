"""Names of jobs fit every engine, and are the same for the same run."""

import re

from hypothesis import given
from hypothesis import strategies as st

from meshloom.runtime.launch.plan import job_name


@given(st.text(max_size=200), st.integers(1, 999), st.integers(1, 9999))
def test_a_pods_name_is_a_dns_label_of_at_most_63_characters(label, num_slices, num_hosts):
    """As JobSet's webhook makes the name of the last pod: pkg/webhooks/jobset_webhook.go."""
    pod = f"{job_name(label, {})}-hosts-{num_slices - 1}-{num_hosts - 1}-abcde"
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", pod)
    assert len(pod) <= 63


def test_two_runs_have_two_names_and_one_has_one():
    first, same, other = (job_name("x" * 100, {"a": {"b": seed, "c": 1}}) for seed in (0, 0, 1))
    assert first == same == job_name("x" * 100, {"a": {"c": 1, "b": 0}})
    assert first != other
    assert job_name("Llama 3 8B, v5p-128", {}).startswith("llama-3-8b-v5p-128-")
