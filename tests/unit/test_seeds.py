"""Random numbers of a seed and a purpose, beside numpy's own seed sequences."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.seeds import Purpose, sequence

NUMBERS = st.one_of(st.integers(0, 3), st.integers(0, (1 << 64) - 1), st.sampled_from([(1 << 32) - 1, 1 << 32]))


@given(NUMBERS, st.sampled_from(Purpose), NUMBERS, NUMBERS)
def test_numbers_of_any_size_give_numpys_bits(seed: int, purpose: Purpose, worker: int, number: int) -> None:
    """Small numbers take a shorter way through numpy, and give the bits of a plain list."""
    plain = np.random.SeedSequence([seed, int(purpose), worker, number])
    assert sequence(seed, purpose, worker, number).generate_state(8).tolist() == plain.generate_state(8).tolist()
