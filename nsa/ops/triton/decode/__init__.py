"""One decode step in four launches."""
