"""`nsa preflight`: everything that can be checked before a run starts."""
