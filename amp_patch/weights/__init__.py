"""Models stored in half, and the fp32 values, masters and gradients of their parameters."""
