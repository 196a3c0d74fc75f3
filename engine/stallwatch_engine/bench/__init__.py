"""The load generator. `run.run` is the way in from Python, `cli.bench` the one from a shell.

Nothing is imported here: `stallwatch bench --help` must not load an HTTP client.
"""
