//! The time of a plan as a sum of terms, each a time by the device's own rates, with factors fitted to
//! measured times.

use problem::Problem;
use tile::Handout;

use super::structure::Structure;
use crate::Arch;

/// Number of terms.
pub(super) const TERMS: usize = 18;
/// The terms of a plan's time, or their factors.
pub(super) type Terms = [f64; TERMS];

/// The work and the bytes that a device does in a µs.
struct Rates {
    /// FLOP of the tensor cores of an SM.
    tensor: f64,
    /// Exponentials of an SM.
    exps: f64,
    /// Bytes from L2, those that one SM takes from it, and bytes from DRAM.
    l2: f64,
    port: f64,
    dram: f64,
    /// Bytes that L2 holds.
    held: f64,
}

/// Exponentials of an SM in a clock.
const EXPS: f64 = 16.0;
/// Bytes that an SM takes from L2 in a clock.
const PORT: f64 = 64.0;
/// The columns of a box of TMA: a narrower box takes as long.
const BOX: usize = 64;
/// The share of L2 in which keys and values stay while other tensors pass through.
const KEPT: f64 = 0.6;

impl Rates {
    /// Rates of the usual device of an architecture, by its data sheet (dense 16-bit products with sums in
    /// f32).
    fn of(arch: &Arch) -> Rates {
        // Clock in MHz under load, FLOP per clock and SM, bytes per clock from L2, GB/s from DRAM, MB of L2.
        let (clock, flop, l2, dram, held) = match arch.sm {
            80 => (1280.0, 2048.0, 3400.0, 2039.0, 40.0),
            86 => (1700.0, 512.0, 1300.0, 936.0, 6.0),
            89 => (1600.0, 1024.0, 1200.0, 300.0, 48.0),
            90 => (1755.0, 4096.0, 3200.0, 4800.0, 50.0),
            _ => (2200.0, 512.0, 3400.0, 1792.0, 96.0),
        };
        Rates {
            tensor: clock * flop,
            exps: clock * EXPS,
            l2: clock * l2,
            port: clock * PORT,
            dram: dram * 1e3,
            held: held * 1e6,
        }
    }
}

/// The terms of a plan's time on an architecture, µs: a launch; tiles and steps that a CTA computes in a row;
/// products, and exponentials, of the SM with the most work; those of one warpgroup in the longest chain of
/// steps; keys and values from L2; all tensors from DRAM; the merge by a second kernel; the merges of a
/// cluster; rows of tiles that are loaded and stored; tiles that a counter hands out; the parts of a shared
/// last wave; merges inside of CTAs; rows of packed tiles; the first blocks of tiles, which no computation
/// hides; keys and values that DRAM delivers again; the blocks of a CTA.
pub(super) fn terms(at: &Structure, problem: &Problem, arch: &Arch) -> Terms {
    let rates = Rates::of(arch);
    let sms = f64::from(arch.multiprocessors.max(1));
    let Chain { tiles, steps, busiest, parts } = Chain::of(at, sms);
    let (dim, dim_v) = (problem.head_dim.next_multiple_of(16) as f64, problem.head_dim_v as f64);
    let of_scores = |rows: u32, keys: u32| {
        let scores = f64::from(rows) * f64::from(keys);
        [scores * 2.0 * (dim + dim_v) / rates.tensor, scores / rates.exps]
    };
    let [products, exps] = of_scores(at.rows, at.step_keys);
    let alone: f64 = of_scores(at.rows.min(at.unit_rows), at.step_keys / at.warpgroups).iter().sum();
    let columns = problem.head_dim.next_multiple_of(BOX) + problem.head_dim_v.next_multiple_of(BOX);
    let block = f64::from(at.step_keys) * 2.0 * columns as f64;
    let of_heads = |heads: usize, rows: usize| (problem.batch * heads * rows) as f64 * 2.0 * (dim + dim_v);
    let keys = of_heads(problem.heads_kv, problem.seq_kv);
    let tensors = of_heads(problem.heads_q, problem.seq_q) + keys;
    let merged = if at.merges { bytes_of_parts(at, problem) / rates.dram + 1.0 } else { 0.0 };
    let rows = tiles * f64::from(at.rows) * dim_v / 1e4;
    let clusters = if at.parts > 1 && !at.merges { tiles * f64::from(at.parts) } else { 0.0 };
    // The tiles of a head are in all waves, or in as many as there are tiles. Each reads all keys and values.
    let passes = (at.ctas as f64 / (sms * f64::from(at.resident))).clamp(1.0, at.tiles_of_head as f64);
    let again = if at.heads_first { (keys / (KEPT * rates.held) - 1.0).clamp(0.0, 1.0) } else { 0.0 };
    [
        1.0,
        tiles,
        steps,
        busiest * products,
        busiest * exps,
        steps * alone,
        at.ctas as f64 * at.mean_steps * block / rates.l2,
        tensors / rates.dram,
        merged,
        clusters,
        rows,
        if at.handout == Handout::Dynamic { tiles } else { 0.0 },
        parts * f64::from(at.rows) * dim_v * 8.0 / rates.l2,
        tiles * f64::from(at.merging).log2(),
        if at.is_packed { rows } else { 0.0 },
        tiles * block / rates.port,
        again * (passes - 1.0) * keys / rates.dram,
        steps * block / rates.port,
    ]
}

/// The work that is done one after another.
struct Chain {
    /// Tiles and steps of a slot: a slot is the place of a CTA on an SM.
    tiles: f64,
    steps: f64,
    /// Steps of the SM with the most work.
    busiest: f64,
    /// Parts into which a shared last wave is divided.
    parts: f64,
}

impl Chain {
    fn of(at: &Structure, sms: f64) -> Chain {
        let (ctas, resident) = (at.ctas as f64, f64::from(at.resident));
        let slots = sms * resident;
        let chain = |tiles, steps, busiest| Chain { tiles, steps, busiest, parts: 0.0 };
        let parts = |tiles: f64| (tiles * at.most_steps).min(sms);
        if ctas <= slots {
            if at.shares_tail && ctas < slots {
                let steps = (ctas * at.mean_steps / slots).ceil();
                return Chain { parts: parts(ctas), ..chain(1.0, steps, steps) };
            }
            let on_sm = if resident > 1.0 { (ctas / sms).ceil() * at.mean_steps } else { 0.0 };
            return chain(1.0, at.most_steps, on_sm.max(at.most_steps));
        }
        let waves = ctas / slots;
        if at.most_steps > at.mean_steps {
            let is_fixed = matches!(at.handout, Handout::Static | Handout::Folded);
            if is_fixed && waves <= FEW_WAVES {
                let steps = most_of_slots(at, slots as u64);
                return chain(waves.ceil(), steps, steps * resident);
            }
            // Long tiles come first, and short ones fill the end. Some slot has one tile of `k` waves and of
            // each longer wave.
            let least = at.ends[0].min(at.ends[1]);
            let longest = |k: u32| {
                let length = at.most_steps - (at.most_steps - least) * (f64::from(k) / waves);
                f64::from(k + 1) * length
            };
            let bound = (1..=3).filter(|&k| f64::from(k) < waves).map(longest).fold(at.most_steps, f64::max);
            let steps = (waves * at.mean_steps + END * at.mean_steps / waves).max(bound);
            let busiest = (ctas / sms * at.mean_steps).max(bound);
            return chain(waves + END, steps, busiest);
        }
        let rest = ctas - waves.floor() * slots;
        if at.shares_tail {
            let all = chain(waves, waves * at.most_steps, ctas / sms * at.most_steps);
            return Chain { parts: parts(rest), ..all };
        }
        let busiest = (waves.floor() * resident + (rest / sms).ceil()) * at.most_steps;
        chain(waves.ceil(), waves.ceil() * at.most_steps, busiest)
    }
}

/// Most waves for which the steps of each slot are added up. In more waves, long and short tiles balance.
const FEW_WAVES: f64 = 8.0;

/// Steps of the slot with the most, if it is known beforehand which tiles a slot computes.
fn most_of_slots(at: &Structure, slots: u64) -> f64 {
    let [first, last] = at.ends;
    let slope = (last - first) / (at.tiles_of_head.max(2) - 1) as f64;
    let steps = |tile: u64| {
        let place = if at.longest_first {
            at.tiles_of_head.saturating_sub(1 + tile / at.heads.max(1))
        } else {
            tile % at.tiles_of_head
        };
        first + slope * place as f64
    };
    let of_slot = |slot: u64| {
        let tile = |wave: u64| {
            let is_back = at.handout == Handout::Folded && wave % 2 == 1;
            wave * slots + if is_back { slots - 1 - slot } else { slot }
        };
        (0..at.ctas.div_ceil(slots)).map(tile).filter(|&tile| tile < at.ctas).map(steps).sum::<f64>()
    };
    (0..slots).map(of_slot).fold(0.0, f64::max)
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

/// The factors, none negative, with the smallest weighted sum of squared relative errors over measured times
/// (terms, µs, weight), plus `pull` times the squared relative distance from `near`.
pub(super) fn fit(measured: &[(Terms, f64, f64)], near: &Terms, pull: f64) -> Terms {
    // The normal equations of the terms over the times: their product with the factors is to be 1.
    let (mut squares, mut sums) = ([[0.0; TERMS]; TERMS], [0.0; TERMS]);
    for (terms, us, weight) in measured {
        for i in 0..TERMS {
            sums[i] += weight * terms[i] / us;
            for j in 0..TERMS {
                squares[i][j] += weight * terms[i] * terms[j] / (us * us);
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
        let measured: Vec<(Terms, f64, f64)> =
            (0..300).map(|number| (terms(number), time(&terms(number), &factors), 1.0)).collect();
        let found = fit(&measured, &[1.0; TERMS], 1e-6);
        for (terms, us, _) in &measured {
            assert!((time(terms, &found) / us).ln().abs() < 0.03, "{us}: {found:?}");
        }
    }
}
