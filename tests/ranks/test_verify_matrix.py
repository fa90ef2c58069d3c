"""The whole matrix of the equality promise; a subset of it runs in test_model.py and test_verify_parallel.py."""

import pytest

from tests.ranks import verify_matrix


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_split_is_bit_equal_to_one_rank(capsys):
    assert verify_matrix.main() == 0, capsys.readouterr().out
