"""Sampling against probabilities that are counted by hand in NumPy."""

from functools import cache

import jax
import numpy as np
import pytest

from meshloom.compiler.step.decode import Sampling, sample

LOGITS = np.log(np.array([0.02, 0.3, 0.08, 0.25, 0.1, 0.25, 1e-9, 3.0], np.float32))  # the last is no token
NUM_TOKENS, NUM_DRAWS = 7, 20_000


@cache
def sampler():
    return jax.jit(sample)


def drawn(*, temperature=1.0, top_k=None, top_p=None, seed=0, count=0, logits=LOGITS, numbers=None):
    sampling = Sampling.of(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, num_tokens=NUM_TOKENS)
    numbers = np.arange(NUM_DRAWS, dtype=np.int32) if numbers is None else numbers
    rows = np.tile(logits, (len(numbers), 1))
    return np.asarray(sampler()(rows, sampling, numbers, np.int32(count)))


def expected_shares(temperature, top_k, top_p):
    """By Python's own sort: the likeliest first, and of equal ones the first."""
    logits = LOGITS[:NUM_TOKENS].astype(np.float64) / temperature
    weights = np.exp(logits - logits.max())
    order = sorted(range(NUM_TOKENS), key=lambda token: (-weights[token], token))[:top_k]
    total, kept, reached = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if kept and top_p is not None and reached >= top_p:
            break
        kept.append(token)
        reached += weights[token] / total
    shares = np.zeros(len(LOGITS))
    shares[kept] = weights[kept] / weights[kept].sum()
    return shares


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, None, None),
        (0.5, None, None),
        (1.5, 3, None),
        (1.0, None, 0.5),
        (1.0, 4, 0.7),
        (1.0, 2, 1e-6),
        (1.0, 1, None),
    ],
)
def test_tokens_come_as_often_as_their_probabilities_say(temperature, top_k, top_p):
    shares = np.bincount(drawn(temperature=temperature, top_k=top_k, top_p=top_p), minlength=len(LOGITS)) / NUM_DRAWS
    expected = expected_shares(temperature, top_k, top_p)
    assert (shares[expected == 0] == 0).all()
    assert (abs(shares - expected) <= 5 * np.sqrt(expected * (1 - expected) / NUM_DRAWS)).all(), (shares, expected)


def test_no_temperature_takes_the_likeliest_token_that_there_is():
    assert set(drawn(temperature=0.0, top_p=0.1)) == {1}


def test_a_choice_depends_on_seed_sequence_and_count_alone():
    all_of_them = drawn()
    assert (drawn(numbers=np.array([7, 3], np.int32)) == all_of_them[[7, 3]]).all()
    assert (drawn(seed=1) != all_of_them).any()
    assert (drawn(count=1) != all_of_them).any()
