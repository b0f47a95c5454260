//! The register and lane of each matrix element (PTX ISA, "Matrix fragments for mma").
//!
//! One rule covers every dense shape. A lane's group is `lane / 4`, its position in the group is `lane % 4`.
//! A register holds `e` consecutive elements in k, so the four lanes of a group hold a run of `4·e` elements.
//! A's registers alternate between rows `group` and `group + 8` (when M = 16) before they advance in k. B's
//! registers advance in k for column `group`.

use super::Shape;

/// Register and lane of A that hold (`row`, `k`). The element within the register is `k % e`.
pub fn locate_a(shape: Shape, e: usize, row: usize, k: usize) -> (usize, usize) {
    let row_blocks = shape.m / 8;
    let register = k / (4 * e) * row_blocks + row / 8;
    (register, row % 8 * 4 + k / e % 4)
}

/// Register and lane of B that hold (`k`, `column`).
pub fn locate_b(e: usize, k: usize, column: usize) -> (usize, usize) {
    (k / (4 * e), column * 4 + k / e % 4)
}

/// Row and column of C held by a 32- or 64-bit accumulator register of `lane`.
pub fn accumulator(shape: Shape, register: usize, lane: usize) -> (usize, usize) {
    debug_assert!(register < shape.m * shape.n / 32);
    (lane / 4 + 8 * (register / 2), lane % 4 * 2 + register % 2)
}

/// Register and lane of C for (`row`, `column`) when a register holds one element (f32, s32, f64).
pub fn locate_c(row: usize, column: usize) -> (usize, usize) {
    (row / 8 * 2 + column % 2, row % 8 * 4 + column / 2)
}

/// Register and lane of C for (`row`, `column`) when a register holds two f16. The half is `column % 2`.
pub fn locate_c_half(row: usize, column: usize) -> (usize, usize) {
    (row / 8, row % 8 * 4 + column / 2)
}
