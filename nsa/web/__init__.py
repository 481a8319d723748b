"""`nsa dashboard`: run folders in a browser, live, side by side; it only reads."""
