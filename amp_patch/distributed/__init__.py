"""Ranks of `torch.distributed`: which of them make one step together, and what each holds of it.

Knows tensors, process groups and torch's own engines; no optimizer of ours, no level, no session.
Where nothing is distributed each question is answered by one look.
"""
