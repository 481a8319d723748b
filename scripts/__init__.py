"""Thin entries under the names that the runbooks use."""
