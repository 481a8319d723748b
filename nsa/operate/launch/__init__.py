"""`nsa launch`: start a run from a profile, phase by phase."""
