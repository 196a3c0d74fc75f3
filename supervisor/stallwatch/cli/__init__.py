"""The operator's command line: click and the standard library, nothing heavier."""
