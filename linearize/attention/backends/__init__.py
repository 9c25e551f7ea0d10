"""Ways to carry out the call of a feature-map kernel, one file each; `choose` has them in order and picks one.

To add a backend, write a file with a class as `contract.Backend` describes it and put it into `choose.BACKENDS`.
"""
