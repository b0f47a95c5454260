//! The units of a thread: [`UNIT`] neighbouring elements of a row, which a thread loads, rotates, compares
//! and rounds.

use problem::DType;
use ptx::{Builder, CmpOp, F32, Global, Half, Pointer, Pred, R32, Shared, Type};
use tile::divide;

use super::code::{QuantizationCode, THREADS, UNIT};

const ELEMENTS: usize = UNIT as usize;
/// Elements of a unit.
pub(super) type Unit = [F32; ELEMENTS];

const WARPS: u32 = THREADS / 32;
/// Bytes of shared memory: a magnitude of each warp.
const SHARED: u32 = 4 * WARPS;

/// The smallest magnitude, 0, in the order that [`magnitude`] makes of floats.
pub(super) const LEAST: u32 = 0x0080_0000;

/// The place of a thread among the units of a slab of rows, and how it rotates them.
pub(super) struct Units {
    code: QuantizationCode,
    /// The row in the slab.
    pub row: R32,
    /// The unit in the row.
    pub unit: R32,
    /// Whether the thread has a unit; `None` if every thread has.
    has_unit: Option<Pred>,
    rotation: Option<Turn>,
}

/// The part of the rotation that belongs to a thread's unit.
struct Turn {
    signs: Signs,
    /// For each exchange with another lane, 1 in the lane of the lower columns and −1 in that of the upper
    /// columns.
    sides: Vec<F32>,
}

/// The signs of a unit's columns.
enum Signs {
    /// The sign bits of pairs of 16-bit elements.
    Pairs(Vec<R32>),
    /// A bit for each column, the first in the lowest bit.
    Bits(R32),
}

impl Units {
    /// `signs` are the words of [`problem::Rotation::signs`].
    pub fn new(k: &mut Builder, code: QuantizationCode, thread: R32, signs: &[R32]) -> Units {
        let units = code.units();
        let row = divide(k, thread, units);
        let before = k.mul(row, units);
        let unit = k.sub(thread, before);
        let has_unit = (!code.all_have_units()).then(|| k.setp_u(CmpOp::Lt, row, code.slab()));
        let rotation = code.rotated.then(|| Turn::new(k, code, unit, signs));
        Units { code, row, unit, has_unit, rotation }
    }

    /// Whether the thread has a unit in the row of index `row`, of `rows` rows.
    pub fn exists(&self, k: &mut Builder, row: R32, rows: R32) -> Pred {
        match self.has_unit {
            Some(has_unit) => k.setp_u_and(CmpOp::Lt, row, rows, has_unit),
            None => k.setp_u(CmpOp::Lt, row, rows),
        }
    }

    /// The bits of a unit; zeros if it does not exist.
    pub fn load(&self, k: &mut Builder, from: Global, exists: Pred) -> Vec<R32> {
        let words: Vec<[R32; 4]> =
            (0..self.code.words() / 4).map(|_| std::array::from_fn(|_| k.mov(0))).collect();
        k.guarded(exists, |k| {
            for (chunk, words) in (0..).zip(&words) {
                k.ld_vec_to(*words, from.at(16 * chunk));
            }
        });
        words.concat()
    }

    /// The elements of a unit in f32, rotated but not normalised. All lanes of a warp take part.
    pub fn elements(&self, k: &mut Builder, words: &[R32]) -> Unit {
        let half = match self.code.from {
            DType::F16 => Some(Half::F16),
            DType::Bf16 => Some(Half::Bf16),
            _ => None,
        };
        let element = |k: &mut Builder, i: usize, word: R32| {
            let word = self.rotation.as_ref().map_or(word, |turn| turn.signs.apply(k, i, word));
            match half {
                Some(half) => k.unpack(half, word).to_vec(),
                None => vec![k.from_bits(word)],
            }
        };
        let wide: Vec<F32> = words.iter().enumerate().flat_map(|(i, &word)| element(k, i, word)).collect();
        let unit: Unit = std::array::from_fn(|i| wide[i]);
        match &self.rotation {
            Some(turn) => turn.butterflies(k, self.code, unit),
            None => unit,
        }
    }

    /// Rounds a unit to codes and stores them.
    pub fn store(&self, k: &mut Builder, (to, exists): (Global, Pred), unit: &Unit, multiplier: F32) {
        let pair = if self.code.to == DType::E5m2 { Type::E5m2x2 } else { Type::E4m3x2 };
        let scaled = unit.map(|x| k.mul(x, multiplier));
        let words: [R32; 4] = std::array::from_fn(|word| {
            k.pack_fp8(pair, std::array::from_fn(|element| scaled[4 * word + element]))
        });
        k.guarded(exists, |k| k.st_vec(to, words));
    }
}

impl Turn {
    fn new(k: &mut Builder, code: QuantizationCode, unit: R32, words: &[R32]) -> Turn {
        // A word has the signs of two units.
        let index = k.shr_u(unit, 1);
        let mut word = words[0];
        for (i, &other) in (1u32..).zip(&words[1..]) {
            let is_it = k.setp_u(CmpOp::Eq, index, i);
            word = k.selp(other, word, is_it);
        }
        let odd = k.and(unit, 1);
        let shift = k.shl(odd, 4);
        let bits = k.shr_u(word, shift);
        let signs = if code.from == DType::F32 {
            Signs::Bits(bits)
        } else {
            let pair = |k: &mut Builder, i: u32| {
                let [low, high] = [15 - 2 * i as i32, 30 - 2 * i as i32];
                let low = if low >= 0 { k.shl(bits, low) } else { k.shr_u(bits, -low) };
                let high = k.shl(bits, high);
                let low = k.and(low, 0x0000_8000u32);
                let high = k.and(high, 0x8000_0000u32);
                k.or(low, high)
            };
            Signs::Pairs((0..UNIT / 2).map(|i| pair(k, i)).collect())
        };
        let side = |k: &mut Builder, lanes: u32| {
            let bit = k.and(unit, lanes);
            let is_upper = k.setp_u(CmpOp::Ne, bit, 0);
            k.selp(-1.0f32, 1.0f32, is_upper)
        };
        let sides = Turn::exchanges(code).map(|lanes| side(k, lanes)).collect();
        Turn { signs, sides }
    }

    /// The distances in lanes between units that are added to each other. Units of a Hadamard matrix are in
    /// neighbouring lanes of one warp, and the first of them is in a lane that their number divides.
    fn exchanges(code: QuantizationCode) -> impl Iterator<Item = u32> {
        let units = code.block() / UNIT;
        (0..units.trailing_zeros()).map(|log| 1 << log)
    }

    fn butterflies(&self, k: &mut Builder, code: QuantizationCode, mut unit: Unit) -> Unit {
        for half in (0..UNIT.trailing_zeros()).map(|log| 1usize << log) {
            for first in (0..ELEMENTS).filter(|i| i & half == 0) {
                let (a, b) = (unit[first], unit[first + half]);
                unit[first] = k.add(a, b);
                unit[first + half] = k.sub(a, b);
            }
        }
        for (lanes, &side) in Turn::exchanges(code).zip(&self.sides) {
            unit = unit.map(|own| {
                let other = k.shfl_xor(own, lanes);
                // `own · ±1` is exact, so that this is one sum or difference.
                k.mad(own, side, other)
            });
        }
        unit
    }
}

impl Signs {
    /// Word `i` of a unit with the signs of its elements changed.
    fn apply(&self, k: &mut Builder, i: usize, word: R32) -> R32 {
        match self {
            Signs::Pairs(pairs) => k.xor(word, pairs[i]),
            Signs::Bits(bits) => {
                let bit = k.shl(*bits, 31 - i as u32);
                let sign = k.and(bit, 0x8000_0000u32);
                k.xor(word, sign)
            }
        }
    }
}

/// Raises `most` to the largest finite magnitude of a unit. Magnitudes are signed integers in the order of
/// floats: the bits of |x|, plus [`LEAST`], with which infinities and NaN become negative.
pub(super) fn raise(k: &mut Builder, most: R32, unit: &Unit) {
    for &x in unit {
        let bits = k.to_bits(x);
        let magnitude = k.and(bits, 0x7FFF_FFFFu32);
        let ordered = k.add(magnitude, LEAST);
        k.max_s_to(most, most, ordered);
    }
}

/// The largest magnitude of all threads of the CTA.
pub(super) fn largest_of_cta(k: &mut Builder, thread: R32, most: R32) -> R32 {
    let shared = k.shared_array("magnitudes", 16, SHARED);
    let mut most = most;
    for lanes in [16, 8, 4, 2, 1] {
        let other = k.shfl_xor(most, lanes);
        most = k.max_s(most, other);
    }
    let warp = k.shr_u(thread, 5);
    let lane = k.and(thread, 31);
    let of_warp: Shared = k.shared_index(shared, warp, 4);
    let is_first = k.setp_u(CmpOp::Eq, lane, 0);
    k.guarded(is_first, |k| k.st(of_warp, most));
    k.bar_sync();
    let chunks = (0..WARPS / 4).map(|chunk| k.ld_vec::<R32, 4>(shared.at(16 * i64::from(chunk))));
    let all: Vec<R32> = chunks.collect::<Vec<_>>().concat();
    all.into_iter().reduce(|a, b| k.max_s(a, b)).unwrap_or(most)
}

/// The descale factor of a block of rows, and the multiplier of its elements
/// ([`problem::Quantization::factor`]).
pub(super) fn factor(k: &mut Builder, code: &QuantizationCode, most: R32) -> [F32; 2] {
    let bits = k.sub(most, LEAST);
    let most = k.from_bits(bits);
    let most = k.mul(most, code.norm());
    let factor = k.div(most, code.to.largest());
    let is_normal = k.setp_f(CmpOp::Ge, factor, f32::MIN_POSITIVE);
    let factor = k.selp(factor, 1.0f32, is_normal);
    let norm: F32 = k.mov(code.norm());
    [factor, k.div(norm, factor)]
}
