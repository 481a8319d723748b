"""`nsa watch`: rules about a running run, and what is done when one fires."""
