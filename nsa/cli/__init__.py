"""The commands of the console: their flags, beside their calls."""
