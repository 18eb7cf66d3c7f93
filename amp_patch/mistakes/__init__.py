"""What is not used as it is meant to be: made right where it can be, else told at once.

Each module has one family of mistakes (docs/mistakes.md). Most of them are made with functions of
torch, which a session replaces for as long as it lasts (`guard`). Knows what the rooms below
know. What runs in every step (a backward, ``zero_grad``, clipping, a ``GradScaler``) has a quick
way out.
"""
