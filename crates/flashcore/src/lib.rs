//! Fused attention on the best device present.
