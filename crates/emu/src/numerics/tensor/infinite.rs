//! Elements of D that depend on a number which is not finite. With a NaN among its operands an element is
//! NaN. With an infinity, the infinite operands decide, or [`super::reference`] where a sum overflows too.

use super::super::Lanes32;
use super::super::round::Format;
use super::recipe::{COLUMNS, Order, ROWS, Recipe};
use super::{Accumulator, MmaKind, reference};

/// The class of a group of numbers: all are finite, some are infinite and none is NaN, or some are NaN.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    Finite,
    Infinite,
    Nan,
}

impl Class {
    /// The class of numbers whose largest bits, without the sign, are these.
    pub(super) fn of(format: Format, largest: u32) -> Class {
        let (nan, infinity) = (format.canonical_nan() as u32, format.infinity() as u32);
        match largest {
            _ if largest < infinity => Class::Finite,
            _ if largest == infinity && infinity != nan => Class::Infinite,
            _ => Class::Nan,
        }
    }
}

/// Marks the sums that are not finite.
#[cold]
#[inline(never)]
pub(super) fn mark(
    accumulator: Accumulator,
    bits: &[[u32; ROWS]; COLUMNS],
    open: &mut [[bool; ROWS]; COLUMNS],
) {
    for (bits, open) in bits.as_flattened().iter().zip(open.as_flattened_mut()) {
        *open |= class_of_sum(accumulator, *bits) != Class::Finite;
    }
}

/// Replaces the elements of D that depend on a number which is not finite.
#[cold]
#[inline(never)]
pub(super) fn replace(
    (kind, recipe): (MmaKind, Recipe),
    [a, b, c]: [&[Lanes32]; 3],
    (rows, columns): ([Class; ROWS], [Class; COLUMNS]),
    (given, open): (&[[u32; ROWS]; COLUMNS], &[[bool; ROWS]; COLUMNS]),
    infinite: impl Fn(usize, usize) -> u32,
    bits: &mut [[u32; ROWS]; COLUMNS],
) {
    let accumulator = kind.accumulator();
    let nan = reference::accumulator_format(accumulator).canonical_nan() as u32;
    let mut elements = None;
    for column in 0..COLUMNS {
        for row in 0..ROWS {
            let class = class_of_sum(accumulator, given[column][row]).max(rows[row]).max(columns[column]);
            bits[column][row] = match (class, open[column][row]) {
                (Class::Nan, _) => nan,
                (Class::Finite, false) => continue,
                // No sum of the chain overflows: the infinite operands alone decide.
                (Class::Infinite, false)
                    if accumulator == Accumulator::F32 && recipe.order == Order::Natural =>
                {
                    infinite(row, column)
                }
                _ => {
                    let new = || reference::Elements::new(kind, recipe, a, b, c);
                    elements.get_or_insert_with(new).get(row, column)
                }
            };
        }
    }
}

/// The f32 sum of products and C of which some are infinite and none is NaN.
pub(super) fn infinite_sum(
    formats: [Format; 2],
    products: impl Iterator<Item = (u32, u32)>,
    given: u32,
) -> u32 {
    let signs = formats.map(|format| format.sign_bit());
    let sizes = formats.map(|format| format.canonical_nan() as u32);
    let infinities = formats.map(|format| format.infinity() as u32);
    let mut seen = [false; 2];
    for (a, b) in products {
        let (x, y) = (a & sizes[0], b & sizes[1]);
        if x >= infinities[0] || y >= infinities[1] {
            if x == 0 || y == 0 {
                return 0x7FFF_FFFF;
            }
            seen[((a >> signs[0] ^ b >> signs[1]) & 1) as usize] = true;
        }
    }
    if given & 0x7FFF_FFFF == 0x7F80_0000 {
        seen[(given >> 31) as usize] = true;
    }
    match seen {
        [true, true] => 0x7FFF_FFFF,
        [_, negative] => 0x7F80_0000 | u32::from(negative) << 31,
    }
}

fn class_of_sum(accumulator: Accumulator, bits: u32) -> Class {
    let format = reference::accumulator_format(accumulator);
    Class::of(format, bits & format.canonical_nan() as u32)
}
