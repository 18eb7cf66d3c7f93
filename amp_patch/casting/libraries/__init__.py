"""Rules for whole functions of other libraries, and of torch, at every level."""
