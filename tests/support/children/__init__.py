"""Programs that tests start as processes of their own: `python -m support.children.NAME`, with tests/ on the path."""
