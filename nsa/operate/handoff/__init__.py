"""`nsa handoff`: one archive for whoever takes over a run."""
