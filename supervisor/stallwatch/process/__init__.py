"""Starting, counting, stopping and burying processes."""
