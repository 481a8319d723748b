"""`nsa handoff`: pack a run into one archive for the person who takes it over."""
