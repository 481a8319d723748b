"""The console commands: one module per family, flags beside calls."""
