//! The means of the keys of each head, in the order of sums of [`Mean`]: a kernel adds the rows of each part
//! of a head, then a kernel adds the parts.

use problem::{Mean, Problem, Rotation};
use ptx::{Access, Builder, CmpOp, Dim3, F32, Global, Launch, Pointer, R32, SpecialReg};

use super::code::{QuantizationCode, THREADS, UNIT};
use super::place::{CtaRows, QuantizeParams, declare_means, declare_sums};
use crate::Arch;
use crate::contract::Contract;
use crate::draft::Draft;
use crate::grid::{Axis, Extents};

const ENTRY: &str = "flash_quantize_means";
/// Strands that a thread loads before it adds the first.
const STRANDS: u32 = 8;

/// The body of the first kernel. A CTA adds the rows of a part: each thread those of a strand in the columns
/// of a unit, then each thread the strands in one column.
pub(super) fn add_rows(k: &mut Builder, code: QuantizationCode, params: QuantizeParams) {
    let place = CtaRows::new(k, code, params);
    let (Some(to), Some(scale)) = (place.params.sums, place.params.scale) else { return };
    let sums: [F32; UNIT as usize] = std::array::from_fn(|_| k.mov(0.0f32));
    place.for_tiles(k, |k, tile| {
        for (share, _) in &tile.shares {
            for unit in place.units.elements(k, share) {
                for (&sum, x) in sums.iter().zip(unit) {
                    // Not fused: the product may have fewer bits than its factor if it is below the normal
                    // numbers, and the CPU rounds it.
                    let x = k.mul(x, scale);
                    k.add_to(sum, sum, x);
                }
            }
        }
    });
    // Threads with neighbouring units of a strand are neighbours, and strands follow each other.
    let strands = k.shared_array("strands", 16, 4 * UNIT * THREADS);
    let own = k.shared_index(strands, place.thread, 4 * UNIT);
    let store = |k: &mut Builder| {
        for (chunk, sums) in (0..).zip(sums.chunks_exact(4)) {
            k.st_vec(own.at(16 * chunk), [sums[0], sums[1], sums[2], sums[3]]);
        }
    };
    match place.units.has_share() {
        Some(has_share) => k.guarded(has_share, store),
        None => store(k),
    }
    k.bar_sync();
    let to = k.index(to, place.index, 4 * code.dim);
    for before in (0..code.dim).step_by(THREADS as usize) {
        let column = k.add(place.thread, before);
        let has_column = k.setp_u(CmpOp::Lt, column, code.dim);
        k.if_(has_column, |k| {
            let first = k.shared_index(strands, column, 4);
            let sum: F32 = k.mov(0.0f32);
            let of_strand = 4 * i64::from(code.dim);
            let add = |k: &mut Builder, count: u32| {
                let loaded: Vec<F32> =
                    (0..count).map(|strand| k.ld(first.at(i64::from(strand) * of_strand))).collect();
                loaded.into_iter().for_each(|x| k.add_to(sum, sum, x));
            };
            k.for_range(0, code.slab() / STRANDS, 1, |k, _| {
                add(k, STRANDS);
                k.add_to(first.base, first.base, STRANDS * 4 * code.dim);
            });
            add(k, code.slab() % STRANDS);
            let to = k.index(to, column, 4);
            k.st(to, sum);
        });
    }
}

/// The second kernel: a thread adds the parts in one column of a head, and changes the sign as the rotation
/// does.
pub(super) fn average(
    problem: &Problem,
    code: QuantizationCode,
    rotation: Option<&Rotation>,
    arch: &Arch,
) -> Draft<'static> {
    let [batch, heads, rows, dim] = problem.extents(code.tensor);
    let mean = Mean::new(rows, dim);
    let threads = code.dim.next_multiple_of(32);
    let (mut k, mut c) = (Builder::kernel(ENTRY), Contract::new(problem));
    k.max_threads(threads);
    let sums = declare_sums(&mut k, &mut c, problem, Access::Read);
    let means = declare_means(&mut k, &mut c, problem, Access::Write);
    let parts = c.u32(&mut k, "parts", mean.parts() as u32);
    let factor = c.f32(&mut k, "factor", mean.factor());
    let signs = rotation.map_or(&[][..], Rotation::signs);
    let signs: Vec<R32> =
        (0..).zip(signs).map(|(i, &word)| c.u32(&mut k, &format!("signs_{i}"), word)).collect();
    let extents = Extents([1, heads as u64, batch as u64]);
    let grid = extents.declare(&mut k, &mut c, code.flat);
    let launch = Launch::new(extents.launch(code.flat), Dim3(threads, 1, 1));
    Draft::new(k, c, (ENTRY, launch), arch.target(), move |k| {
        let (column, head) = (k.special(SpecialReg::TidX), grid.index(k, Axis::Y));
        let (heads, entry) = (grid.extent(k, Axis::Y), grid.index(k, Axis::Z));
        let has_column = k.setp_u(CmpOp::Lt, column, code.dim);
        k.if_(has_column, |k| {
            let head = k.mad(entry, heads, head);
            let part = k.mul_wide_u(head, parts);
            let base = k.mad(part, 4 * u64::from(code.dim), sums.base);
            let from = k.index(Global { base, offset: sums.offset }, column, 4);
            // All loads before the first sum, so that they wait for memory together.
            let loaded: Vec<F32> = (0..Mean::PARTS as u32)
                .map(|part| {
                    let sum = k.mov(0.0f32);
                    let exists = k.setp_u(CmpOp::Gt, parts, part);
                    k.guarded(exists, |k| k.ld_to(sum, from.at(i64::from(4 * part * code.dim))));
                    sum
                })
                .collect();
            let sum: F32 = k.mov(0.0f32);
            loaded.into_iter().for_each(|part| k.add_to(sum, sum, part));
            let mut mean = k.mul(sum, factor);
            if let Some(word) = word_of(k, &signs, column) {
                let left = k.and(column, 31);
                let sign = k.shr_u(word, left);
                let sign = k.shl(sign, 31);
                let bits = k.to_bits(mean);
                let flipped = k.xor(bits, sign);
                mean = k.from_bits(flipped);
            }
            let to = k.index(means, head, 4 * code.dim);
            let to = k.index(to, column, 4);
            k.st(to, mean);
        });
    })
}

/// The word of `words` with the bit of a column; `None` without words.
fn word_of(k: &mut Builder, words: &[R32], column: R32) -> Option<R32> {
    let index = k.shr_u(column, 5);
    (0..).zip(words).fold(None, |word: Option<R32>, (i, &own)| match word {
        None => Some(own),
        Some(other) => {
            let is_it = k.setp_u(CmpOp::Eq, index, i);
            Some(k.selp(own, other, is_it))
        }
    })
}
