//! Times every plan of a bounded space against the default plan on some problems. Prints the distance of the
//! default from the best plan, and its gain over the rule that it replaced: `exhaustive [SECONDS
//! [PROBLEM…]]`.
//!
//! The number of plans is quartered until eight are left. In each round, each plan is timed in turns with the
//! default (A B, then B A), and the fastest quarter gets three times as many rounds next. The best plan is
//! then timed again, because the best of many is also the luckiest.

use std::collections::HashSet;
use std::time::Instant;

use cpu::{CpuPlan, Element, Isa, Lanes, Order, Rows, attention};
use half::{bf16, f16};
use problem::{Band, DType, Layout, Problem, Tensor};
use rand::{Rng, SeedableRng, rngs::SmallRng};

use crate::{Outcome, Usage};

/// Number of plans that are left in the end.
const FINALISTS: usize = 8;
/// Minimum duration of a sample in s. Shorter calls are repeated.
const SAMPLE: f64 = 2e-4;

pub fn main(args: &[String]) -> Outcome {
    let (seconds, only) = match args {
        [seconds, only @ ..] => (seconds.parse().map_err(|_| Usage)?, only),
        [] => (5.0, args),
    };
    println!("problem              plans   default us   best plan is faster by   before/default   best plan");
    for (name, problem) in problems() {
        if only.is_empty() || only.iter().any(|wanted| name.contains(wanted.as_str())) {
            match problem.dtypes.q {
                DType::F32 => search::<f32>(name, &problem, seconds),
                DType::F16 => search::<f16>(name, &problem, seconds),
                DType::Bf16 => search::<bf16>(name, &problem, seconds),
                dtype => unreachable!("{dtype} is not searched"),
            }
        }
    }
    Ok(true)
}

fn problems() -> Vec<(&'static str, Problem)> {
    let keys = |p: Problem, keys| p.with_seq_kv(keys, Layout::Bhsd);
    let grouped = |p: Problem, heads| p.with_heads_kv(heads, Layout::Bhsd);
    vec![
        ("mission-f16", Problem::mission()),
        ("mission-f32", Problem::new(1, 8, 512, 64, DType::F32)),
        ("decode-gqa-bf16", grouped(keys(Problem::new(1, 32, 1, 128, DType::Bf16), 8192), 8)),
        ("decode-mha-f32", keys(Problem::new(1, 8, 1, 64, DType::F32), 2048)),
        ("decode-mqa-f16", grouped(keys(Problem::new(1, 8, 1, 128, DType::F16), 16384), 1)),
        ("decode-batch-bf16", grouped(keys(Problem::new(8, 32, 1, 128, DType::Bf16), 1024), 8)),
        ("speculate-bf16", grouped(keys(Problem::new(1, 16, 3, 128, DType::Bf16), 4096), 4)),
        ("tiny-f32", Problem::new(1, 4, 32, 32, DType::F32)),
        ("short-many-f32", Problem::new(4, 12, 77, 64, DType::F32)),
        ("one-head-f32", Problem::new(1, 1, 160, 64, DType::F32)),
        ("one-head-long-f16", keys(Problem::new(1, 1, 64, 64, DType::F16), 16384)),
        ("causal-d128-bf16", Problem::new(1, 4, 768, 128, DType::Bf16).with_band(Band::CAUSAL)),
        ("causal-d80-f32", Problem::new(1, 3, 700, 80, DType::F32).with_band(Band::CAUSAL)),
        ("d256-f32", Problem::new(1, 4, 256, 256, DType::F32)),
        ("gqa-f16", grouped(Problem::new(1, 16, 256, 64, DType::F16), 2)),
        ("d32-f32", Problem::new(2, 8, 256, 32, DType::F32)),
    ]
}

/// The previous rule: whole panels, four tasks per thread, all threads, query rows as lanes.
fn before(p: &Problem) -> CpuPlan {
    let isa =
        Isa::available().into_iter().find(|&isa| isa != Isa::Amx && isa.is_for(p)).unwrap_or(Isa::Portable);
    let (threads, panel) = (rayon::current_num_threads(), isa.panel_rows());
    let most = if isa == Isa::Avx512Vnni { 16 } else { 8 };
    let rows = p.heads_q * p.batch * p.seq_q;
    let block_q = (rows / (threads * 4) / panel).clamp(1, most) * panel;
    let rows = if p.seq_q < panel { Rows::Group } else { Rows::Head };
    CpuPlan { rows, ..CpuPlan::widest(isa, threads, block_q, 128) }
}

/// The bounded space: every combination of these values.
fn space(p: &Problem) -> Vec<CpuPlan> {
    let mut isas: Vec<Isa> = Isa::available();
    isas.retain(|isa| isa.is_for(p));
    isas.truncate(2);
    let mut plans = Vec::new();
    for isa in isas {
        for (lanes, vectors, tile_rows) in tiles(isa) {
            for threads in [1, rayon::current_num_threads()] {
                for block_q in [8, 16, 32, 48, 64, 80, 128, 192, 256, 512, 1024] {
                    for block_kv in [16, 32, 64, 128, 256, 512] {
                        for splits in [1, 2, 4, 8] {
                            for (rows, order) in [
                                (Rows::Head, Order::Longest),
                                (Rows::Head, Order::Heads),
                                (Rows::Group, Order::Longest),
                                (Rows::Group, Order::Heads),
                            ] {
                                let plan = CpuPlan::widest(isa, threads, block_q, block_kv);
                                plans.push(CpuPlan {
                                    lanes,
                                    vectors,
                                    tile_rows,
                                    rows,
                                    order,
                                    splits,
                                    ..plan
                                });
                            }
                        }
                    }
                }
            }
        }
    }
    let mut seen = HashSet::new();
    plans.retain(|plan| plan.check(p).is_ok());
    plans.into_iter().map(|plan| plan.canonical(p)).filter(|plan| seen.insert(*plan)).collect()
}

fn tiles(isa: Isa) -> Vec<(Lanes, usize, usize)> {
    let (widest, tallest) = isa.tile();
    let mut tiles: Vec<_> = (1..=widest).map(|v| (Lanes::Queries, v, isa.tile_rows(v))).collect();
    tiles.extend([(Lanes::Dims, widest, tallest), (Lanes::Dims, 1, isa.tile_rows(1))]);
    tiles
}

struct Stage<'a, T> {
    problem: &'a Problem,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    out: Vec<T>,
    calls: usize,
}

impl<T: Element> Stage<'_, T> {
    /// Seconds of a call, after a warm-up call.
    fn time(&mut self, plan: &CpuPlan) -> f64 {
        self.run(plan);
        let start = Instant::now();
        (0..self.calls).for_each(|_| self.run(plan));
        start.elapsed().as_secs_f64() / self.calls as f64
    }

    fn run(&mut self, plan: &CpuPlan) {
        let Stage { problem, q, k, v, out, .. } = self;
        attention(problem, q, k, v, out, None, plan).expect("a checked plan");
    }

    /// time(other) / time(plan) for each plan, the median over `rounds` rounds.
    fn ratios(&mut self, plans: &[CpuPlan], other: &CpuPlan, rounds: usize) -> Vec<f64> {
        let mut all = vec![Vec::new(); plans.len()];
        for round in 0..rounds {
            for (plan, ratios) in plans.iter().zip(&mut all) {
                let (first, second) = if round % 2 == 0 { (plan, other) } else { (other, plan) };
                let (a, b) = (self.time(first), self.time(second));
                ratios.push(if round % 2 == 0 { b / a } else { a / b });
            }
        }
        all.into_iter().map(median).collect()
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn search<T: Element>(name: &str, problem: &Problem, seconds: f64) {
    let mut rng = SmallRng::seed_from_u64(1);
    let mut draw = |tensor| -> Vec<T> {
        let elements = problem.span(tensor).map_or(0, |(elements, _)| elements);
        (0..elements).map(|_| T::from_f32(rng.random_range(-1.0..1.0))).collect()
    };
    let (q, k, v, out) = (draw(Tensor::Q), draw(Tensor::K), draw(Tensor::V), draw(Tensor::Out));
    let mut stage = Stage { problem, q, k, v, out, calls: 1 };
    let default = CpuPlan::for_problem(problem);
    let once = median((0..9).map(|_| stage.time(&default)).collect());
    stage.calls = (SAMPLE / once).ceil() as usize;
    let mut field = space(problem);
    let (plans, mut rounds) = (field.len(), 1);
    while field.len() > FINALISTS {
        let ratios = stage.ratios(&field, &default, rounds);
        let mut order: Vec<usize> = (0..field.len()).collect();
        order.sort_by(|&a, &b| ratios[b].total_cmp(&ratios[a]));
        order.truncate((field.len() / 4).max(FINALISTS));
        field = order.into_iter().map(|i| field[i]).collect();
        rounds = (rounds * 3).min(27);
    }
    // The remaining time is for the finalists, and the same time again for the best finalist.
    let round = 2.0 * once * (stage.calls + 1) as f64;
    let ratios = stage.ratios(&field, &default, ((seconds / round) as usize / field.len()).clamp(15, 300));
    let best =
        (0..field.len()).max_by(|&a, &b| ratios[a].total_cmp(&ratios[b])).map_or(default, |i| field[i]);
    let rounds = ((seconds / round) as usize / 2).clamp(15, 300);
    let anew = stage.ratios(&[best], &default, rounds)[0];
    let gain = 1.0 / stage.ratios(&[before(problem)], &default, rounds)[0];
    println!(
        "{name:<20} {plans:>5} {:>12.1} {:>20.1} % {gain:>14.2}   {}",
        once * 1e6,
        100.0 * (anew - 1.0),
        brief(&best)
    );
    println!("{:>66} default: {}", "", brief(&default));
}

fn brief(p: &CpuPlan) -> String {
    let CpuPlan { isa, threads, block_q, block_kv, lanes, vectors, tile_rows, rows, order, splits } = p;
    format!(
        "{isa} {threads} threads, {block_q}x{block_kv}, {lanes:?} {tile_rows}x{vectors}, {rows:?} {order:?}, {splits} parts"
    )
}
