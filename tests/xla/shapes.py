"""Linears of a tiny layer, for tests of lanes."""

#: (out, in) by linear.
SHAPES = {
    "q_proj": (24, 16),
    "k_proj": (8, 16),
    "v_proj": (8, 16),
    "o_proj": (16, 24),
    "gate_proj": (40, 16),
    "up_proj": (40, 16),
    "down_proj": (16, 40),
}
