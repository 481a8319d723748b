"""Helpers of the tests: cases, fixtures, servers and processes that several files share."""
