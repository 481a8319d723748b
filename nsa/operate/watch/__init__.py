"""`nsa watch`: rules that raise alarms about a run, and the actions they trigger."""
