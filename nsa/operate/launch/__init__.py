"""`nsa launch`: a run by a profile, through its phases, from one command."""
