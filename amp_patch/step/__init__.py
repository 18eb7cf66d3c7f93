"""One training step in its order: scale the loss, unscale and check gradients, step or skip."""
