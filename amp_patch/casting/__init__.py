"""Casts around torch's functions (O1, O4), the cache of weight casts, and regions."""
