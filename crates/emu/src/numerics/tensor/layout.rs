//! Where each matrix element sits in a warp's registers (PTX ISA, "Matrix fragments for mma").
//!
//! One rule covers every dense shape. A lane's group is `lane / 4`, its place in the group `lane % 4`. A register
//! holds `e` neighbours in k, so four lanes hold a run of `4·e`. A's registers alternate between rows `group` and
//! `group + 8` (when M = 16) before moving on in k; B's move on in k for column `group`.

use super::Shape;

/// Register and lane of A's run that holds (`row`, `k`); the element within the register is `k % e`.
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

/// Register and lane of C for (`row`, `column`) when a register holds two f16; the half is `column % 2`.
pub fn locate_c_half(row: usize, column: usize) -> (usize, usize) {
    (row / 8, row % 8 * 4 + column / 2)
}
