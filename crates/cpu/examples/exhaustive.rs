//! Times every plan of a bounded space against the shipped default on some problems, and says how far the default is from the best:
//! `cargo run --release -p flashcore-cpu --example exhaustive [SECONDS [PROBLEM…]]`.

use std::time::Instant;

use flashcore_cpu::{CpuPlan, Element, Isa, Lanes, Order, Rows, attention};
use half::{bf16, f16};
use problem::{DType, Layout, Mask, Problem, Tensor};
use rand::{Rng, SeedableRng, rngs::SmallRng};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let seconds: f64 = arguments.next().and_then(|x| x.parse().ok()).unwrap_or(20.0);
    let only: Vec<String> = arguments.collect();
    for (name, problem) in problems() {
        if only.is_empty() || only.iter().any(|wanted| name.contains(wanted.as_str())) {
            match problem.dtype {
                DType::F32 => search::<f32>(name, &problem, seconds),
                DType::F16 => search::<f16>(name, &problem, seconds),
                DType::Bf16 => search::<bf16>(name, &problem, seconds),
            }
        }
    }
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
        ("decode-batch-bf16", grouped(keys(Problem::new(16, 32, 1, 128, DType::Bf16), 2048), 8)),
        ("speculate-bf16", grouped(keys(Problem::new(1, 16, 6, 128, DType::Bf16), 4096), 4)),
        ("tiny-f32", Problem::new(1, 4, 32, 32, DType::F32)),
        ("short-many-f32", Problem::new(8, 12, 77, 64, DType::F32)),
        ("one-head-f32", Problem::new(1, 1, 160, 64, DType::F32)),
        ("one-head-long-f16", keys(Problem::new(1, 1, 64, 64, DType::F16), 16384)),
        ("causal-d128-bf16", Problem::new(1, 8, 1024, 128, DType::Bf16).with_mask(Mask::Causal)),
        ("causal-f32", Problem::new(1, 3, 700, 80, DType::F32).with_mask(Mask::Causal)),
        ("wide-f32", Problem::new(1, 4, 384, 256, DType::F32)),
        ("gqa-f16", grouped(Problem::new(1, 16, 256, 64, DType::F16), 2)),
        ("d32-f32", Problem::new(2, 8, 256, 32, DType::F32)),
    ]
}

/// The bounded space.
fn space(p: &Problem) -> Vec<CpuPlan> {
    let best = CpuPlan::for_problem(p).isa;
    let all = rayon::current_num_threads();
    let mut plans = Vec::new();
    let isas: Vec<Isa> =
        [best, Isa::best(), Isa::Avx512].into_iter().filter(|isa| isa.is_available()).collect();
    for (i, &isa) in isas.iter().enumerate() {
        if isas[..i].contains(&isa) || (isa == Isa::Avx512Vnni && p.dtype == DType::F32) {
            continue;
        }
        for threads in [1, all] {
            for block_q in [4, 8, 16, 32, 48, 64, 80, 96, 128, 192, 256, 512, 1024] {
                for block_kv in [32, 64, 128, 256, 512] {
                    for splits in [1, 2, 4, 8] {
                        for rows in [Rows::Head, Rows::Group] {
                            for order in [Order::Longest, Order::Heads] {
                                for (lanes, vectors, tile_rows) in tiles(isa) {
                                    plans.push(CpuPlan {
                                        lanes,
                                        vectors,
                                        tile_rows,
                                        rows,
                                        order,
                                        splits,
                                        ..CpuPlan::widest(isa, threads, block_q, block_kv)
                                    });
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    let mut seen = std::collections::HashSet::new();
    plans.retain(|plan| plan.check(p).is_ok());
    plans.into_iter().map(|plan| plan.canonical(p)).filter(|plan| seen.insert(*plan)).collect()
}

fn tiles(isa: Isa) -> Vec<(Lanes, usize, usize)> {
    let (widest, _) = isa.tile();
    let mut tiles: Vec<_> = (1..=widest).map(|v| (Lanes::Queries, v, isa.tile_rows(v))).collect();
    if isa != Isa::Avx512Vnni {
        tiles.extend([(Lanes::Dims, widest, isa.tile_rows(widest)), (Lanes::Dims, 1, isa.tile_rows(1))]);
    }
    tiles
}

struct Stage<'a, T> {
    problem: &'a Problem,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    out: Vec<T>,
}

impl<T: Element> Stage<'_, T> {
    fn run(&mut self, plan: &CpuPlan, calls: usize) -> f64 {
        let start = Instant::now();
        for _ in 0..calls {
            attention(self.problem, &self.q, &self.k, &self.v, &mut self.out, None, plan)
                .expect("a checked plan");
        }
        start.elapsed().as_secs_f64() / calls as f64
    }
}

fn search<T: Element>(name: &str, problem: &Problem, seconds: f64) {
    let mut rng = SmallRng::seed_from_u64(1);
    let mut draw = |tensor| -> Vec<T> {
        let elements = problem.span(tensor).map_or(0, |(elements, _)| elements);
        (0..elements).map(|_| T::from_f32(rng.random_range(-1.0..1.0))).collect()
    };
    let (q, k, v, out) = (draw(Tensor::Q), draw(Tensor::K), draw(Tensor::V), draw(Tensor::Out));
    let mut stage = Stage { problem, q, k, v, out };
    let default = CpuPlan::for_problem(problem);
    let once = (0..5).map(|_| stage.run(&default, 1)).fold(f64::INFINITY, f64::min);
    let calls = (2e-4 / once).ceil() as usize;
    let mut field = space(problem);
    let plans = field.len();
    let mut rounds = 1;
    // Halving: whoever is in the slower three quarters is out, until a few are left, whom the rest of the time is for.
    let start = Instant::now();
    let mut scores: Vec<f64>;
    loop {
        scores = ratios(&mut stage, &field, &default, calls, rounds);
        let mut order: Vec<usize> = (0..field.len()).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        if field.len() <= 8 {
            field = order.iter().map(|&i| field[i]).collect();
            scores = order.iter().map(|&i| scores[i]).collect();
            break;
        }
        order.truncate((field.len() / 4).max(8));
        field = order.iter().map(|&i| field[i]).collect();
        rounds = (rounds * 3).min(99);
    }
    let left = (seconds - start.elapsed().as_secs_f64()).max(1.0);
    let rounds = (left / (once * calls as f64 * 3.0)) as usize;
    let fresh = ratios(&mut stage, &field[..1], &default, calls, rounds.clamp(15, 400))[0];
    println!(
        "{name}: {plans} plans, default {:.1} us, best {:.3}x (raced anew {fresh:.3}x) {}",
        once * 1e6,
        scores[0],
        brief(&field[0])
    );
    println!("    default {}", brief(&default));
}

fn brief(p: &CpuPlan) -> String {
    format!(
        "{} t{} q{} kv{} {:?} {}x{} {:?} {:?} /{}",
        p.isa, p.threads, p.block_q, p.block_kv, p.lanes, p.tile_rows, p.vectors, p.rows, p.order, p.splits
    )
}

/// time(default) / time(plan), the median over rounds in which the two come one after the other.
fn ratios<T: Element>(
    stage: &mut Stage<'_, T>,
    plans: &[CpuPlan],
    default: &CpuPlan,
    calls: usize,
    rounds: usize,
) -> Vec<f64> {
    let mut all = vec![Vec::new(); plans.len()];
    for round in 0..rounds {
        for (plan, ratios) in plans.iter().zip(&mut all) {
            stage.run(plan, 1);
            let (ours, theirs) = if round % 2 == 0 {
                let ours = stage.run(plan, calls);
                (ours, stage.run(default, calls))
            } else {
                let theirs = stage.run(default, calls);
                (stage.run(plan, calls), theirs)
            };
            ratios.push(theirs / ours);
        }
    }
    all.into_iter()
        .map(|mut r| {
            r.sort_by(f64::total_cmp);
            r[r.len() / 2]
        })
        .collect()
}
