"""One folder per op: `reference.py` is plain torch in fp32 and the specification; faster versions stand beside it."""
