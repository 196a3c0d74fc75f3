"""The life of one engine as a total table, and the budget that paces restarts. Pure."""
