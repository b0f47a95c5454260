//! Measured peaks of this machine's processor, the counterpart of a GPU's data sheet: the rate of products in
//! registers, and the rate of reads of a buffer as large as the problem's inputs. All threads measure at once
//! on an otherwise idle machine. No kernel exceeds these rates.

use std::time::Instant;

use cpu::{Isa, peak};
use problem::{DType, Problem};
use serde::{Deserialize, Serialize};

use super::Floor;

/// Measurements per thread; the best one counts.
const TIMES: usize = 6;
/// Target length of one measurement of products, seconds: long compared with a thread switch.
const BURST: f64 = 1e-3;
/// Rounds of the trial that calibrates this length.
const TRIAL: usize = 2000;
/// Bytes of the largest buffer that is read. A larger buffer is not read faster.
const LARGEST: usize = 1 << 26;

/// The measured peaks of all threads of a processor together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CpuPeaks {
    /// Number of threads.
    pub threads: usize,
    /// The rate of products for each element type of the problems.
    pub products: Vec<Products>,
    /// The rate of reads for each input size of the problems.
    pub reads: Vec<Reads>,
}

/// The rate of products for one element type.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Products {
    pub dtype: DType,
    /// The fastest instruction set that the kernels support for this type.
    pub isa: Isa,
    pub flops: f64,
}

/// The rate of repeated reads of one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reads {
    /// Size of the buffer, bytes.
    pub bytes: usize,
    /// Bytes per second.
    pub bandwidth: f64,
}

impl CpuPeaks {
    /// Measures the peaks that bound these problems on this machine: some ten milliseconds for each type and
    /// size.
    pub fn measure(problems: &[Problem]) -> CpuPeaks {
        let (mut products, mut reads): (Vec<Products>, Vec<Reads>) = (Vec::new(), Vec::new());
        for problem in problems {
            if !products.iter().any(|known| Some(known.dtype) == problem.dtypes.one()) {
                products.extend(problem.dtypes.one().and_then(fastest));
            }
            let bytes = (inputs(problem) as usize).min(LARGEST);
            if !reads.iter().any(|known| known.bytes == bytes) {
                reads.extend(read_bandwidth(bytes).map(|bandwidth| Reads { bytes, bandwidth }));
            }
        }
        CpuPeaks { threads: rayon::current_num_threads(), products, reads }
    }

    /// The shortest possible time of one call and the product rate behind it; `None` for a type that was not
    /// measured.
    pub fn floor(&self, problem: &Problem) -> Option<(Floor, Products)> {
        let products = *self.products.iter().find(|known| Some(known.dtype) == problem.dtypes.one())?;
        let bytes = inputs(problem);
        // The largest measured buffer that is no larger than the inputs: a smaller buffer is read no slower.
        let reads = self.reads.iter().filter(|known| known.bytes as f64 <= bytes);
        let reads = reads.max_by_key(|known| known.bytes);
        let bytes_us = reads.map_or(0.0, |known| bytes / known.bandwidth * 1e6);
        Some((Floor { flops_us: problem.flops() / products.flops * 1e6, bytes_us }, products))
    }
}

fn inputs(problem: &Problem) -> f64 {
    let outputs = problem.batch * problem.heads_q * problem.seq_q * problem.head_dim_v;
    problem.bytes() - (outputs * problem.dtypes.out.bytes()) as f64
}

/// FLOP per second of all threads on numbers in registers, by the fastest instructions that the kernels
/// support for an element type. `None` if nothing could be measured.
pub fn products_rate(dtype: DType) -> Option<f64> {
    fastest(dtype).map(|products| products.flops)
}

/// The fastest products for an element type.
fn fastest(dtype: DType) -> Option<Products> {
    let many_rows = Problem::new(1, 1, 1024, 64, dtype);
    let isas = Isa::available().into_iter().filter(|isa| isa.is_for(&many_rows));
    let rates = isas.filter_map(|isa| Some(Products { dtype, isa, flops: rate(isa)? }));
    rates.max_by(|a, b| a.flops.total_cmp(&b.flops))
}

/// FLOP/s of all threads together.
fn rate(isa: Isa) -> Option<f64> {
    let trial = of_all(|_| {
        let began = Instant::now();
        peak::products(isa, TRIAL);
        1.0 / began.elapsed().as_secs_f64()
    });
    let threads = rayon::current_num_threads() as f64;
    let rounds = (TRIAL as f64 * BURST * trial? / threads).clamp(1.0, 1e8) as usize;
    of_all(|_| {
        let began = Instant::now();
        peak::products(isa, rounds) / began.elapsed().as_secs_f64()
    })
}

/// Bytes per second at which all threads read a buffer, each its own part, again and again. `None` if nothing
/// could be measured.
pub fn read_bandwidth(bytes: usize) -> Option<f64> {
    let threads = rayon::current_num_threads();
    let buffer = vec![1.0f32; bytes / size_of::<f32>()];
    let part = (buffer.len() / threads).max(1);
    let share = part * size_of::<f32>();
    // Repeats the read so that a measurement covers at least 1 MiB per thread.
    let again = (1 << 20) / share.max(1) + 1;
    of_all(|thread| {
        let part = buffer.chunks_exact(part).nth(thread).unwrap_or_default();
        let began = Instant::now();
        (0..again).for_each(|_| peak::read(std::hint::black_box(part)));
        (size_of_val(part) * again) as f64 / began.elapsed().as_secs_f64()
    })
}

/// The sum over the threads of each one's best measurement, with all threads active at once. A short
/// disturbance of a thread does not lower the result.
fn of_all(measure: impl Fn(usize) -> f64 + Sync) -> Option<f64> {
    let runs: Vec<Vec<f64>> =
        (0..TIMES).map(|_| rayon::broadcast(|context| measure(context.index()))).collect();
    let best = |thread: usize| runs.iter().filter_map(|run| run.get(thread)).copied().fold(0.0, f64::max);
    let sum: f64 = (0..runs.first()?.len()).map(best).sum();
    // Rounded to whole numbers, which JSON keeps exactly.
    Some(sum.round()).filter(|sum| sum.is_finite() && *sum > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_work_over_rate() {
        let products = vec![
            Products { dtype: DType::F32, isa: Isa::Avx512, flops: 2e11 },
            Products { dtype: DType::F16, isa: Isa::Amx, flops: 4e12 },
        ];
        let reads =
            vec![Reads { bytes: 1 << 16, bandwidth: 4e11 }, Reads { bytes: 1 << 20, bandwidth: 1e11 }];
        let peaks = CpuPeaks { threads: 2, products, reads };
        // Two products of 512 × 512 × 64 for each of 8 heads, two FLOP each: 0.537 GFLOP.
        let mission = Problem::new(1, 8, 512, 64, DType::F32);
        let (floor, by) = peaks.floor(&mission).unwrap();
        assert_eq!(by.isa, Isa::Avx512);
        assert!((floor.flops_us - 536_870_912.0 / 2e11 * 1e6).abs() < 1e-6, "{floor:?}");
        // Q, K and V are 3 MiB, more than the largest measured buffer.
        assert!((floor.bytes_us - 3.0 * 1048576.0 / 1e11 * 1e6).abs() < 1e-6, "{floor:?}");
        assert_eq!(floor.us(), floor.flops_us);
        let half = peaks.floor(&Problem { dtypes: DType::F16.into(), ..mission.clone() }).unwrap();
        assert_eq!((half.1.isa, half.0.flops_us * 20.0), (Isa::Amx, floor.flops_us));
        assert_eq!(peaks.floor(&Problem { dtypes: DType::Bf16.into(), ..mission }), None);
        // One row of queries against 1024 keys: 512 KiB of inputs, bounded by the rate of the next smaller
        // measured buffer.
        let decode = Problem { seq_q: 1, ..Problem::new(1, 1, 1024, 64, DType::F32) };
        let (floor, _) = peaks.floor(&decode).unwrap();
        assert!((floor.bytes_us - (2.0 * 1024.0 + 1.0) * 256.0 / 4e11 * 1e6).abs() < 1e-9, "{floor:?}");
        assert_eq!(floor.us(), floor.bytes_us);
        // Inputs smaller than every measured buffer are bounded by the products alone.
        let tiny = peaks.floor(&Problem::new(1, 1, 16, 64, DType::F32)).unwrap().0;
        assert_eq!(tiny.bytes_us, 0.0);
    }

    #[test]
    fn a_machine_has_peaks_for_what_is_asked() {
        let problems = [Problem::new(1, 2, 64, 32, DType::F32), Problem::new(1, 2, 64, 32, DType::F16)];
        let peaks = CpuPeaks::measure(&[problems.clone(), problems.clone()].concat());
        assert_eq!((peaks.products.len(), peaks.reads.len()), (2, 2), "{peaks:?}");
        assert!(
            problems.iter().all(|problem| peaks.floor(problem).is_some_and(|(floor, _)| floor.us() > 0.0))
        );
        let text = serde_json::to_string(&peaks).unwrap();
        assert_eq!(serde_json::from_str::<CpuPeaks>(&text).unwrap(), peaks);
    }
}
