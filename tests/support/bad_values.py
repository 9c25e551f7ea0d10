"""Values that a config may hold where another one is expected."""

VALUES = [None, True, -1, 0, 1, 3, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), "", "x", "softmax", [], {}]
