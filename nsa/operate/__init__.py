"""Operating a run from outside: judge its folder, stop it where it must, show how it goes."""
