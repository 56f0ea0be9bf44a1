"""What all tests in here share."""

from tests.support.own_golden_data import own_golden_data

__all__ = ["own_golden_data"]
