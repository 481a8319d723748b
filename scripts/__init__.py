"""Entry scripts under the names that the runbooks use."""
