"""What tests run in processes of its own, see `support.forks`."""
