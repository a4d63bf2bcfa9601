"""The share of the peak that attention reaches, by the size of a head."""

from collections.abc import Mapping


def share_of_head(shares: Mapping[int, float], size: int) -> float:
    """Returns the share of the peak that attention with heads of this size reaches. Between two sizes that are known,
    what a score takes is a line: its matmuls, and its part of the softmax. A smaller head takes as long as the smallest
    that is known."""
    known = sorted(shares)
    if size <= known[0]:
        return shares[known[0]] * size / known[0]
    if size >= known[-1]:
        return shares[known[-1]]
    low, high = max(each for each in known if each <= size), min(each for each in known if each >= size)
    if low == high:
        return shares[low]
    at_low, at_high = low / shares[low], high / shares[high]
    return size / (at_low + (at_high - at_low) * (size - low) / (high - low))
