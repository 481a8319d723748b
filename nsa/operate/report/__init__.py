"""`nsa report`: a verdict about a run from its files alone."""
