"""`nsa triage`: short runs with one switch changed at a time."""
