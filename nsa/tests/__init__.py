"""The tests: folders mirror the package; the files at the top are called by runbooks."""
