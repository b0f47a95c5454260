//! The distance between a row of the table of tuned plans and a problem.

use problem::{Band, Shape, Tensor};

use super::Device;
use super::table::TunedRow;
use crate::forward::packing::filled;

/// Rows at a larger distance are ignored. A problem with twice the rows and twice the keys is at a distance
/// of about 2 + ½ + 1.
pub(super) const FARTHEST: f64 = 4.0;

/// Rows of a nominal tile: waves are counted with this tile for all plans.
const TILE_ROWS: usize = 64;
/// Beyond this number of waves, and beyond the lengths below, a larger number no longer changes which plan is
/// best.
const MANY_WAVES: f64 = 16.0;
const LONG: usize = 8192;
/// An `mma` tile has at least this many rows; fewer rows cost the same.
const MMA_ROWS: usize = 16;

/// The distance; `None` if the row is not comparable with the problem: another architecture, head dimension
/// or mask, or tiles that queries fill twice as much (prefill compared with decode).
///
/// The distance is a weighted sum of differences in powers of two. The number of waves of row tiles has the
/// largest weight, then the length of the loop over keys, then the number of rows of one head and of heads
/// that share keys. f16 and bf16 count as equal. Devices of one architecture count as equal too, except for
/// their SM counts, which determine the waves.
pub(super) fn distance(row: &TunedRow, shape: &Shape, device: &Device) -> Option<f64> {
    let of = &row.problem;
    let exact = row.sm == device.arch.sm
        && (of.head_dim, of.head_dim_v) == (shape.head_dim, shape.head_dim_v)
        && (of.mask == shape.mask || of.mask == unwindowed(shape.mask))
        && sizes(of) == sizes(shape);
    if !exact {
        return None;
    }
    let apart = |a: f64, b: f64| (a / b).log2().abs();
    if apart(fill(of), fill(shape)) > 1.0 {
        return None;
    }
    let length = |seq: usize, least: usize| seq.clamp(least, LONG) as f64;
    let kind = |differs: bool| if differs { 0.125 } else { 0.0 };
    Some(
        2.0 * apart(waves(of, row.multiprocessors), waves(shape, device.arch.multiprocessors))
            + apart(length(of.seq_kv, 1), length(shape.seq_kv, 1))
            + 0.5 * apart(length(of.seq_q, MMA_ROWS), length(shape.seq_q, MMA_ROWS))
            + 0.25 * apart(group(of) as f64, group(shape) as f64)
            + kind(of.dtypes != shape.dtypes)
            + kind(!same_device(&row.device, device.name)),
    )
}

/// The band without the sizes of its window: a plan that is fast for a causal mask, or without a mask, is a
/// starting point for windows.
fn unwindowed(band: Band) -> Band {
    Band { before: None, after: band.after.map(|_| 0), ..band }.aligned(band.corner)
}

/// Bytes of an element of each tensor.
fn sizes(shape: &Shape) -> [usize; 4] {
    Tensor::FORWARD.map(|tensor| shape.dtypes.of(tensor).bytes())
}

/// Query heads per KV head.
fn group(shape: &Shape) -> usize {
    (shape.heads_q / shape.heads_kv.max(1)).max(1)
}

/// The fraction of a tile that queries fill, with or without pack-GQA, whichever is larger.
fn fill(shape: &Shape) -> f64 {
    let rows = shape.seq_q.max(1);
    filled(rows, TILE_ROWS as u32).max(filled(rows.saturating_mul(group(shape)), TILE_ROWS as u32))
}

/// The distance between two problems in the number of scores, in powers of two.
pub(super) fn sizes_apart(a: &Shape, b: &Shape) -> f64 {
    let scores =
        |s: &Shape| [s.batch, s.heads_q, s.seq_q, s.seq_kv].map(|n| n.max(1) as f64).iter().product::<f64>();
    (scores(a) / scores(b)).log2().abs()
}

/// Row tiles per SM.
fn waves(shape: &Shape, multiprocessors: u32) -> f64 {
    let tiles = shape.seq_q.div_ceil(TILE_ROWS) as f64 * shape.batch as f64 * shape.heads_q as f64;
    (tiles / f64::from(multiprocessors.max(1))).min(MANY_WAVES)
}

/// Whether two names mean the same device: drivers report "NVIDIA A100-SXM4-80GB" where users write "A100".
pub(super) fn same_device(a: &str, b: &str) -> bool {
    let words = |name: &str| -> Vec<String> {
        let lower = name.to_lowercase();
        let brand = |word: &&str| !["", "nvidia", "geforce", "tesla"].contains(word);
        lower.split([' ', '-']).filter(brand).map(str::to_owned).collect()
    };
    let (a, b) = (words(a), words(b));
    !a.is_empty() && !b.is_empty() && a.iter().zip(&b).all(|(x, y)| x == y)
}

#[cfg(test)]
mod tests {
    use problem::{Band, DType, Problem};

    use super::*;
    use crate::Arch;
    use crate::select::tests::row;

    const H200: Device = Device { name: "NVIDIA H200", arch: Arch::SM_90 };

    fn from_mission(problem: &Problem, device: &Device) -> Option<f64> {
        distance(&row(Problem::mission()), &Shape::of(problem), device)
    }

    #[test]
    fn names_of_one_device() {
        for (a, b, same) in [
            ("NVIDIA H200", "h200", true),
            ("NVIDIA A100-SXM4-80GB", "A100", true),
            ("NVIDIA GeForce RTX 4090", "RTX 4090", true),
            ("NVIDIA L40S", "L4", false),
            ("NVIDIA H200", "H100", false),
            ("", "H200", false),
        ] {
            assert_eq!(same_device(a, b), same, "{a} {b}");
        }
    }

    #[test]
    fn what_makes_kernels_alike_is_near() {
        let mission = Problem::mission();
        assert_eq!(from_mission(&mission, &H200), Some(0.0));
        let bf16 = Problem { dtypes: DType::Bf16.into(), ..mission.clone() };
        let batch = Problem::new(2, 4, 512, 64, DType::F16);
        let more_heads = Problem::new(1, 16, 512, 64, DType::F16);
        let d = |p: &Problem| from_mission(p, &H200).unwrap();
        assert_eq!(d(&batch), 0.0, "batch and heads are one");
        assert!(0.0 < d(&bf16) && d(&bf16) < d(&more_heads));
        // The same GPU under another name, and one with half of its SMs.
        let half = Device { arch: Arch { multiprocessors: 66, ..Arch::SM_90 }, ..H200 };
        assert_eq!(from_mission(&mission, &half), Some(2.0));
        // If every SM has many waves of work, doubling the heads changes nothing.
        let long = |heads| Problem::new(1, heads, 8192, 64, DType::F16);
        let of_long = |p: &Problem| distance(&row(long(16)), &Shape::of(p), &H200);
        assert!(of_long(&long(32)).unwrap() < 0.2);
    }

    #[test]
    fn other_mathematics_is_no_neighbour() {
        let mission = Problem::mission();
        assert_eq!(from_mission(&mission.clone().with_band(Band::CAUSAL), &H200), None);
        assert_eq!(from_mission(&Problem::new(1, 8, 512, 128, DType::F16), &H200), None);
        assert_eq!(from_mission(&Problem { dtypes: DType::F32.into(), ..mission.clone() }, &H200), None);
        assert_eq!(from_mission(&mission, &Device { arch: Arch::SM_80, ..H200 }), None);
    }
}
