"""The three training stages and what they share."""
