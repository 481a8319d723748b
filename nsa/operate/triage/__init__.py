"""`nsa triage`: short runs with one setting changed at a time."""
