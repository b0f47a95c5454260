//! The work of a thread on its share of a row: the thread loads units of [`UNIT`] neighbouring elements,
//! rotates, compares and rounds them.

use std::collections::BTreeSet;

use problem::{DType, Rotation};
use ptx::{Builder, CmpOp, F32, Global, Half, Pointer, Pred, R32, Shared, Type};
use tile::divide;

use super::code::{QuantizationCode, UNIT};

const ELEMENTS: usize = UNIT as usize;
/// Elements of a unit.
pub(super) type Unit = [F32; ELEMENTS];

/// The place of a thread in a slab of rows, and how it rotates its share of a row.
pub(super) struct Units {
    code: QuantizationCode,
    /// The row in the slab.
    pub row: R32,
    /// The first unit of the share; the others follow at [`QuantizationCode::distance`].
    pub first: R32,
    /// Whether the thread has a share; `None` if every thread has.
    has_share: Option<Pred>,
    rotation: Option<Turn>,
    /// The mean of the first unit's columns with the signs of the rotation; `None` if no mean is subtracted.
    mean: Option<Global>,
}

/// The part of the rotation that belongs to a thread's share.
struct Turn {
    /// For each unit, the word of [`sign_words`] with the unit's bits in the upper places of both halves.
    signs: Vec<R32>,
    /// For each exchange with another lane, 1 in the lane of the lower columns and −1 in that of the upper
    /// columns.
    sides: Vec<F32>,
}

/// The signs of a rotation as kernels read them, a word for two units. Of unit `u` of a word, the sign of
/// column `2 i` is bit `15 − 8 u − i`, and that of column `2 i + 1` is bit `31 − 8 u − i`. A shift by `8 u +
/// i` moves both to the sign bits of a pair of 16-bit floats.
pub(super) fn sign_words(rotation: &Rotation) -> Vec<u32> {
    let word = |&signs: &u32| {
        (0..32).fold(0, |word, column| {
            let (unit, pair, upper) = (column / UNIT, column % UNIT / 2, column % 2);
            word | (signs >> column & 1) << (15 + 16 * upper - 8 * unit - pair)
        })
    };
    rotation.signs().iter().map(word).collect()
}

impl Units {
    /// `signs` are the words of [`sign_words`]. No mean is subtracted.
    pub fn new(k: &mut Builder, code: QuantizationCode, thread: R32, signs: &[R32]) -> Units {
        let row = divide(k, thread, code.lanes());
        let before = k.mul(row, code.lanes());
        let lane = k.sub(thread, before);
        // The lanes of a Hadamard matrix follow each other, and so do their first units.
        let block = divide(k, lane, code.distance());
        let first = k.mad(block, code.block_units() - code.distance(), lane);
        let all = code.threads.is_multiple_of(code.lanes());
        let has_share = (!all).then(|| k.setp_u(CmpOp::Lt, row, code.slab()));
        let rotation = code.rotated.then(|| Turn::new(k, code, first, signs));
        Units { code, row, first, has_share, rotation, mean: None }
    }

    /// Subtracts the mean of the head's rows. `head` is its first column, with the signs of the rotation.
    pub fn subtract(&mut self, k: &mut Builder, head: Global) {
        self.mean = Some(k.index(head, self.first, 4 * UNIT));
    }

    /// Whether the thread has a share.
    pub fn has_share(&self) -> Option<Pred> {
        self.has_share
    }

    /// Whether the thread has a share of the row of index `row`, of `rows` rows.
    pub fn exists(&self, k: &mut Builder, row: R32, rows: R32) -> Pred {
        match self.has_share {
            Some(has_share) => k.setp_u_and(CmpOp::Lt, row, rows, has_share),
            None => k.setp_u(CmpOp::Lt, row, rows),
        }
    }

    /// The bits of a share, unit by unit, whose first unit is at `from`; zeros if `guard` is false.
    pub fn load(&self, k: &mut Builder, from: Global, guard: Option<Pred>) -> Vec<Vec<R32>> {
        let words = self.code.words();
        let chunk = |k: &mut Builder, at: Global| match guard {
            Some(guard) => {
                let loaded: [R32; 4] = std::array::from_fn(|_| k.mov(0));
                k.guarded(guard, |k| k.ld_vec_to(loaded, at));
                loaded
            }
            None => k.ld_vec(at),
        };
        let mut share = Vec::new();
        for unit in 0..self.code.share() {
            let at = from.at(i64::from(unit * self.code.distance()) * 4 * words as i64);
            let loaded: Vec<[R32; 4]> =
                (0..words as i64 / 4).map(|number| chunk(k, at.at(16 * number))).collect();
            share.push(loaded.concat());
        }
        share
    }

    /// The elements of a share in f32, less the mean, rotated but not normalised. All lanes of a warp take
    /// part.
    pub fn elements(&self, k: &mut Builder, share: &[Vec<R32>]) -> Vec<Unit> {
        let units = self.before_pairs(k, share);
        self.add_pairs(k, &units)
    }

    /// The elements of a share before the rotation adds and subtracts the last pairs ([`Units::add_pairs`]).
    pub fn before_pairs(&self, k: &mut Builder, share: &[Vec<R32>]) -> Vec<Unit> {
        let mut units: Vec<Unit> = Vec::new();
        for (number, words) in share.iter().enumerate() {
            let signs = self.rotation.as_ref().map(|turn| turn.signs[number]);
            let unit = widen(k, self.code.from, words, signs);
            if let Some(mean) = self.mean {
                let columns = number as u32 * self.code.distance() * UNIT;
                subtract(k, unit, mean.at(4 * i64::from(columns)));
            }
            units.push(unit);
        }
        if let Some(turn) = &self.rotation {
            turn.rotate(k, self.code, &mut units);
        }
        units
    }

    /// Whether [`Units::add_pairs`] adds: a thread that has several units of a Hadamard matrix adds the first
    /// half of them to the second half at last.
    fn has_pairs(&self) -> bool {
        self.code.rotated && self.code.share() > 1
    }

    /// The sums and the differences of the last pairs of a share.
    pub fn add_pairs(&self, k: &mut Builder, units: &[Unit]) -> Vec<Unit> {
        if !self.has_pairs() {
            return units.to_vec();
        }
        let (lower, upper) = units.split_at(units.len() / 2);
        let pairs = || lower.iter().zip(upper);
        let sums: Vec<Unit> = pairs().map(|(a, b)| std::array::from_fn(|i| k.add(a[i], b[i]))).collect();
        let differences = pairs().map(|(a, b)| std::array::from_fn(|i| k.sub(a[i], b[i])));
        sums.into_iter().chain(differences).collect()
    }

    /// Raises `most`, the bits of a float that is not negative, to the largest finite magnitude of shares.
    /// `before` are their elements before the last pairs are added, `all` gives the elements.
    pub fn raise(
        &self,
        k: &mut Builder,
        most: R32,
        before: &[Vec<Unit>],
        all: impl FnOnce(&mut Builder) -> Vec<Unit>,
    ) {
        // Two maxima, so that one does not wait for the one before it.
        let largest = if self.has_pairs() {
            // Of a sum and a difference, the larger magnitude is the sum of the magnitudes. Integers have the
            // order of floats that are not negative, and a maximum of three on sm_90.
            let largest: [R32; 2] = std::array::from_fn(|_| k.mov(0));
            let halves = before.iter().map(|units| units.split_at(units.len() / 2));
            for (a, b) in halves.flat_map(|(lower, upper)| lower.iter().zip(upper)) {
                for i in 0..ELEMENTS {
                    let (a, b) = (k.abs(a[i]), k.abs(b[i]));
                    let magnitude = k.add(a, b);
                    let bits = k.to_bits(magnitude);
                    k.max_s_to(largest[i % 2], largest[i % 2], bits);
                }
            }
            k.max_s(largest[0], largest[1])
        } else {
            // These maxima leave out NaN.
            let largest: [F32; 2] = std::array::from_fn(|_| k.mov(0.0f32));
            for (i, &x) in before.iter().flatten().flatten().enumerate() {
                let magnitude = k.abs(x);
                k.max_to(largest[i % 2], largest[i % 2], magnitude);
            }
            let largest = k.max(largest[0], largest[1]);
            k.to_bits(largest)
        };
        let is_finite = k.setp_s(CmpOp::Lt, largest, f32::INFINITY.to_bits());
        k.if_else(
            is_finite,
            |k| k.max_s_to(most, most, largest),
            |k| {
                let finite: F32 = k.from_bits(most);
                for &x in all(k).iter().flatten() {
                    let magnitude = k.abs(x);
                    let is_finite = k.setp_f(CmpOp::Lt, magnitude, f32::INFINITY);
                    k.guarded(is_finite, |k| k.max_to(finite, finite, magnitude));
                }
                let bits = k.to_bits(finite);
                k.mov_to(most, bits);
            },
        );
    }

    /// Rounds a share to codes and stores them, those of the first unit at `to`.
    pub fn store(&self, k: &mut Builder, (to, exists): (Global, Pred), share: &[Unit], multiplier: F32) {
        let pair = if self.code.to == DType::E5m2 { Type::E5m2x2 } else { Type::E4m3x2 };
        for (number, unit) in (0..).zip(share) {
            let scaled = unit.map(|x| k.mul(x, multiplier));
            let words: [R32; 4] = std::array::from_fn(|word| {
                k.pack_fp8(pair, std::array::from_fn(|element| scaled[4 * word + element]))
            });
            let to = to.at(number * i64::from(self.code.distance() * UNIT));
            k.guarded(exists, |k| k.st_vec(to, words));
        }
    }
}

/// The elements of a unit in f32, with the signs of [`Turn::signs`].
fn widen(k: &mut Builder, from: DType, words: &[R32], signs: Option<R32>) -> Unit {
    // Moves the sign of an element to the sign bit, and those of a pair to both.
    let signed = |k: &mut Builder, word: R32, shift: u32, mask: u32| {
        let Some(signs) = signs else { return word };
        let moved = if shift == 0 { signs } else { k.shl(signs, shift) };
        let bits = k.and(moved, mask);
        k.xor(word, bits)
    };
    let half = match from {
        DType::F16 => Some(Half::F16),
        DType::Bf16 => Some(Half::Bf16),
        _ => None,
    };
    let mut elements = Vec::new();
    for (i, &word) in (0..).zip(words) {
        match half {
            Some(half) => {
                let word = signed(k, word, i, 0x8000_8000);
                elements.extend(k.unpack(half, word));
            }
            None => {
                let shift = i / 2 + if i % 2 == 0 { 16 } else { 0 };
                let word = signed(k, word, shift, 0x8000_0000);
                elements.push(k.from_bits(word));
            }
        }
    }
    std::array::from_fn(|i| elements[i])
}

/// Subtracts the mean at `mean` from the elements of a unit.
fn subtract(k: &mut Builder, unit: Unit, mean: Global) {
    for (chunk, elements) in (0..).zip(unit.chunks_exact(4)) {
        let of_columns: [F32; 4] = k.regs();
        k.ld_vec_to(of_columns, mean.at(16 * chunk));
        for (&x, mean) in elements.iter().zip(of_columns) {
            k.sub_to(x, x, mean);
        }
    }
}

impl Turn {
    fn new(k: &mut Builder, code: QuantizationCode, first: R32, words: &[R32]) -> Turn {
        let signs = (0..code.share()).map(|unit| {
            let before = unit * code.distance();
            let number = k.add(first, before);
            // The words in which some lane has this unit.
            let lanes = (0..code.lanes()).map(|lane| {
                let block = lane / code.distance();
                (lane + block * (code.block_units() - code.distance()) + before) / 2
            });
            let possible: BTreeSet<u32> = lanes.collect();
            let index = k.shr_u(number, 1);
            let mut word: Option<R32> = None;
            for candidate in possible {
                let own = words[candidate as usize];
                word = Some(match word {
                    None => own,
                    Some(other) => {
                        let is_it = k.setp_u(CmpOp::Eq, index, candidate);
                        k.selp(own, other, is_it)
                    }
                });
            }
            let odd = k.and(number, 1);
            let shift = k.shl(odd, 3);
            k.shl(word.unwrap_or(words[0]), shift)
        });
        let signs = signs.collect();
        let side = |k: &mut Builder, lanes: u32| {
            let bit = k.and(first, lanes);
            let is_upper = k.setp_u(CmpOp::Ne, bit, 0);
            k.selp(-1.0f32, 1.0f32, is_upper)
        };
        let sides = Turn::exchanges(code).map(|lanes| side(k, lanes)).collect();
        Turn { signs, sides }
    }

    /// The distances in lanes between units that are added to each other. The lanes of a Hadamard matrix are
    /// neighbours in one warp, and their number divides the number of the first.
    fn exchanges(code: QuantizationCode) -> impl Iterator<Item = u32> {
        (0..code.distance().trailing_zeros()).map(|log| 1 << log)
    }

    /// Neighbours first, as [`Rotation::mix`]: inside units, between lanes, and between units of the share,
    /// but for the last pairs ([`Units::add_pairs`]).
    fn rotate(&self, k: &mut Builder, code: QuantizationCode, units: &mut [Unit]) {
        for unit in &mut *units {
            for half in (0..UNIT.trailing_zeros()).map(|log| 1usize << log) {
                for first in (0..ELEMENTS).filter(|i| i & half == 0) {
                    let (a, b) = (unit[first], unit[first + half]);
                    unit[first] = k.add(a, b);
                    unit[first + half] = k.sub(a, b);
                }
            }
            for (lanes, &side) in Turn::exchanges(code).zip(&self.sides) {
                *unit = unit.map(|own| {
                    let other = k.shfl_xor(own, lanes);
                    // `own · ±1` is exact, so that this is one sum or difference.
                    k.mad(own, side, other)
                });
            }
        }
        for half in (0..code.share().trailing_zeros().saturating_sub(1)).map(|log| 1usize << log) {
            for first in (0..units.len()).filter(|unit| unit & half == 0) {
                let (a, b) = (units[first], units[first + half]);
                units[first] = std::array::from_fn(|i| k.add(a[i], b[i]));
                units[first + half] = std::array::from_fn(|i| k.sub(a[i], b[i]));
            }
        }
    }
}

/// The largest magnitude of all threads of the CTA.
pub(super) fn largest_of_cta(k: &mut Builder, code: &QuantizationCode, thread: R32, most: R32) -> R32 {
    let most = largest_of_warp(k, most);
    let warps = code.threads / 32;
    if warps == 1 {
        return most;
    }
    let shared = k.shared_array("magnitudes", 4, 4 * warps);
    let warp = k.shr_u(thread, 5);
    let of_warp: Shared = k.shared_index(shared, warp, 4);
    let is_first = is_first_lane(k, thread);
    k.guarded(is_first, |k| k.st(of_warp, most));
    k.bar_sync();
    largest_of(k, shared, warps)
}

/// The largest magnitude of all threads of the cluster, in which the CTA has the rank `rank`. The threads
/// have arrived at the cluster's barrier before, so that a CTA has started when its shared memory is written.
pub(super) fn largest_of_cluster(
    k: &mut Builder,
    code: &QuantizationCode,
    (thread, rank): (R32, R32),
    most: R32,
) -> R32 {
    let most = largest_of_warp(k, most);
    let warps = code.threads / 32;
    let shared = k.shared_array("magnitudes", 4, 4 * warps * code.cluster());
    let warp = k.shr_u(thread, 5);
    let place = k.mad(rank, warps, warp);
    let of_warp: Shared = k.shared_index(shared, place, 4);
    let is_first = is_first_lane(k, thread);
    k.cluster_wait();
    for cta in 0..code.cluster() {
        let of_warp = k.mapa(of_warp, cta);
        k.guarded(is_first, |k| k.st(of_warp, most));
    }
    // No CTA writes to another one after this barrier, so that each may exit.
    k.cluster_arrive();
    k.cluster_wait();
    largest_of(k, shared, warps * code.cluster())
}

/// The largest magnitude of all lanes of the warp.
fn largest_of_warp(k: &mut Builder, most: R32) -> R32 {
    let mut most = most;
    for lanes in [16, 8, 4, 2, 1] {
        let other = k.shfl_xor(most, lanes);
        most = k.max_s(most, other);
    }
    most
}

fn is_first_lane(k: &mut Builder, thread: R32) -> Pred {
    let lane = k.and(thread, 31);
    k.setp_u(CmpOp::Eq, lane, 0)
}

/// The largest of `count` magnitudes in shared memory.
fn largest_of(k: &mut Builder, shared: Shared, count: u32) -> R32 {
    let mut most = k.ld(shared);
    for warp in 1..count {
        let other: R32 = k.ld(shared.at(4 * i64::from(warp)));
        most = k.max_s(most, other);
    }
    most
}

/// The descale factor of a block of rows, and the multiplier of its elements
/// ([`problem::Quantization::factor`]).
pub(super) fn factor(k: &mut Builder, code: &QuantizationCode, most: R32) -> [F32; 2] {
    let most = k.from_bits(most);
    let most = k.mul(most, code.norm());
    let factor = k.div(most, code.to.largest());
    let is_normal = k.setp_f(CmpOp::Ge, factor, f32::MIN_POSITIVE);
    let factor = k.selp(factor, 1.0f32, is_normal);
    let norm: F32 = k.mov(code.norm());
    [factor, k.div(norm, factor)]
}
