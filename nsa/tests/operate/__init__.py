"""Tests of operate."""
