//! The time of a plan as a sum of terms, each a time by the device's own rates, with factors fitted to
//! measured times.

use problem::Problem;

use super::structure::Structure;
use crate::Arch;

/// Number of terms.
pub(super) const TERMS: usize = 11;
/// The terms of a plan's time, or their factors.
pub(super) type Terms = [f64; TERMS];

/// What a device computes and moves in a µs.
struct Rates {
    /// FLOP of the tensor cores of an SM.
    tensor: f64,
    /// Exponentials of an SM.
    exps: f64,
    /// Bytes from L2, and from DRAM.
    l2: f64,
    dram: f64,
}

/// Exponentials of an SM in a clock.
const EXPS: f64 = 16.0;

impl Rates {
    /// Rates of the usual device of an architecture, by its data sheet (dense 16-bit products with sums in
    /// f32).
    fn of(arch: &Arch) -> Rates {
        // Clock in MHz under load, FLOP per clock and SM, bytes per clock from L2, GB/s from DRAM.
        let (clock, flop, l2, dram) = match arch.sm {
            80 => (1280.0, 2048.0, 3400.0, 2039.0),
            86 => (1700.0, 512.0, 1300.0, 936.0),
            89 => (1600.0, 1024.0, 1200.0, 300.0),
            90 => (1755.0, 4096.0, 3200.0, 4800.0),
            _ => (2200.0, 512.0, 3400.0, 1792.0),
        };
        Rates { tensor: clock * flop, exps: clock * EXPS, l2: clock * l2, dram: dram * 1e3 }
    }
}

/// The terms of a plan's time on an architecture, µs: a launch; tiles and steps that a CTA computes in a row;
/// products, and exponentials, of the SM with the most work; those of one warpgroup in the longest chain of
/// steps; keys and values from L2; all tensors from DRAM; the merge by a second kernel; the merges of a
/// cluster; rows of tiles that are loaded and stored.
pub(super) fn terms(at: &Structure, problem: &Problem, arch: &Arch) -> Terms {
    let rates = Rates::of(arch);
    let sms = f64::from(arch.multiprocessors.max(1));
    let Chain { tiles, steps, busiest } = Chain::of(at, sms);
    let (dim, dim_v) = (problem.head_dim.next_multiple_of(16) as f64, problem.head_dim_v as f64);
    let of_scores = |rows: u32, keys: u32| {
        let scores = f64::from(rows) * f64::from(keys);
        [scores * 2.0 * (dim + dim_v) / rates.tensor, scores / rates.exps]
    };
    let [products, exps] = of_scores(at.rows, at.step_keys);
    let alone: f64 = of_scores(at.rows.min(at.unit_rows), at.step_keys / at.warpgroups).iter().sum();
    let copied = at.ctas as f64 * at.mean_steps * 2.0 * f64::from(at.step_keys) * (dim + dim_v);
    let of_heads = |heads: usize, rows: usize| (problem.batch * heads * rows) as f64 * 2.0 * (dim + dim_v);
    let tensors = of_heads(problem.heads_q, problem.seq_q) + of_heads(problem.heads_kv, problem.seq_kv);
    let merged = if at.merges { bytes_of_parts(at, problem) / rates.dram + 1.0 } else { 0.0 };
    let clusters = if at.parts > 1 && !at.merges { tiles } else { 0.0 };
    [
        1.0,
        tiles,
        steps,
        busiest * products,
        busiest * exps,
        steps * alone,
        copied / rates.l2,
        tensors / rates.dram,
        merged,
        clusters,
        tiles * f64::from(at.rows) * dim_v / 1e4,
    ]
}

/// The work that is done one after another.
struct Chain {
    /// Tiles and steps of a slot: a slot is the place of a CTA on an SM.
    tiles: f64,
    steps: f64,
    /// Steps of the SM with the most work.
    busiest: f64,
}

impl Chain {
    fn of(at: &Structure, sms: f64) -> Chain {
        let (ctas, resident) = (at.ctas as f64, f64::from(at.resident));
        let slots = sms * resident;
        if ctas <= slots {
            let on_sm = if resident > 1.0 { (ctas / sms).ceil() * at.mean_steps } else { 0.0 };
            return Chain { tiles: 1.0, steps: at.most_steps, busiest: on_sm.max(at.most_steps) };
        }
        let waves = ctas / slots;
        if at.most_steps > at.mean_steps {
            // Long tiles come first, and short ones fill the end.
            let steps = (waves * at.mean_steps).max(at.most_steps) + END * at.mean_steps / waves;
            let busiest = (ctas / sms * at.mean_steps).max(at.most_steps);
            return Chain { tiles: waves + END, steps, busiest };
        }
        if at.shares_tail {
            return Chain { tiles: waves, steps: waves * at.most_steps, busiest: ctas / sms * at.most_steps };
        }
        let last = ((ctas - waves.floor() * slots) / sms).ceil();
        Chain {
            tiles: waves.ceil(),
            steps: waves.ceil() * at.most_steps,
            busiest: (waves.floor() * resident + last) * at.most_steps,
        }
    }
}

/// The share of a tile for which a slot is idle at the end if tiles differ in length.
const END: f64 = 0.3;

/// Bytes of the parts of O that are stored in f32 and read again.
fn bytes_of_parts(at: &Structure, p: &Problem) -> f64 {
    2.0 * 4.0 * f64::from(at.parts) * (p.batch * p.heads_q * p.seq_q * p.head_dim_v) as f64
}

/// The sum of the terms, each times its factor.
pub(super) fn time(terms: &Terms, factors: &Terms) -> f64 {
    terms.iter().zip(factors).map(|(term, factor)| term * factor).sum()
}

/// The factors, none negative, with the smallest sum of squared relative errors over measured times, plus `pull` times
/// the squared relative distance from `near`.
pub(super) fn fit(measured: &[(Terms, f64)], near: &Terms, pull: f64) -> Terms {
    // The normal equations of the terms over the times: their product with the factors is to be 1.
    let (mut squares, mut sums) = ([[0.0; TERMS]; TERMS], [0.0; TERMS]);
    for (terms, us) in measured {
        for i in 0..TERMS {
            sums[i] += terms[i] / us;
            for j in 0..TERMS {
                squares[i][j] += terms[i] * terms[j] / (us * us);
            }
        }
    }
    for i in 0..TERMS {
        let scale = pull / (near[i] * near[i] + 0.01);
        squares[i][i] += scale;
        sums[i] += scale * near[i];
    }
    let mut factors = *near;
    for _ in 0..ROUNDS {
        for i in 0..TERMS {
            let others: f64 = (0..TERMS).filter(|&j| j != i).map(|j| squares[i][j] * factors[j]).sum();
            factors[i] =
                if squares[i][i] > 0.0 { ((sums[i] - others) / squares[i][i]).max(0.0) } else { 0.0 };
        }
    }
    factors
}

/// Rounds of the coordinate descent.
const ROUNDS: usize = 2000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_found_from_times() {
        let factors: Terms = std::array::from_fn(|i| 0.2 + 0.3 * i as f64);
        let terms = |number: usize| -> Terms {
            std::array::from_fn(|i| 1.0 + ((number * number * (i + 1) + number * i) % 23) as f64)
        };
        let measured: Vec<(Terms, f64)> =
            (0..300).map(|number| (terms(number), time(&terms(number), &factors))).collect();
        let found = fit(&measured, &[1.0; TERMS], 1e-6);
        for (terms, us) in &measured {
            assert!((time(terms, &found) / us).ln().abs() < 0.03, "{us}: {found:?}");
        }
    }
}
