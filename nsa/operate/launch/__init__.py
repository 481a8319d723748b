"""`nsa launch`: start a run by a profile and take it through its phases."""
