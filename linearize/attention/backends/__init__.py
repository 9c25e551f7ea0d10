"""Ways to carry out the call of a feature-map kernel; `choose` has them in order and takes the first that can.

To add a backend, write a file with a class as `contract.Backend` describes it and put an instance into
`choose.BACKENDS`.
"""
