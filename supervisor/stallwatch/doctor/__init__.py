"""Checks of what is needed at three in the morning."""
