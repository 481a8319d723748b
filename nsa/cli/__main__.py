"""`python -m nsa.cli` is `nsa`."""

from nsa.cli.main import entry

if __name__ == "__main__":
    entry()
