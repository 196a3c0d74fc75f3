"""Looking: snapshots, pure rules, two looks, host witnesses."""
