"""Tests of generate."""
