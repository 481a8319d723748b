"""`nsa dashboard`: run folders live in a browser, side by side. Read-only."""
