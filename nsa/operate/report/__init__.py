"""`nsa report`: a GO or NO-GO verdict about a run, from its files alone."""
