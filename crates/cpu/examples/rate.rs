//! Prints the rate of the native kernels:
//! `cargo run --release -p flashcore-cpu --example rate [threads [isa]]`.

use std::time::Instant;

use flashcore_cpu::{CpuPlan, Element, Isa, attention};
use half::{bf16, f16};
use problem::{Band, Problem};
use rand::{Rng, SeedableRng, rngs::SmallRng};

fn rate<T: Element>(mut problem: Problem, threads: usize, isa: Isa) {
    problem.dtypes = T::DTYPE.into();
    let mut rng = SmallRng::seed_from_u64(1);
    let elements = problem.heads_q * problem.seq_q * problem.head_dim;
    let mut draw = || -> Vec<T> { (0..elements).map(|_| T::from_f32(rng.random_range(-1.0..1.0))).collect() };
    let (q, k, v, mut out) = (draw(), draw(), draw(), draw());
    let mut plan = CpuPlan::with_isa(&problem, isa);
    plan.threads = threads;
    let repeats = (2e10 / problem.flops()) as usize + 5;
    let mut times: Vec<f64> = (0..repeats)
        .map(|_| {
            let start = Instant::now();
            attention(&problem, &q, &k, &v, &mut out, None, &plan).expect("a plan for this machine");
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let gflops = |t: f64| problem.flops() / t / 1e9;
    println!(
        "{isa} {threads} threads H{} S{} D{} {} {}: {:.0} GFLOP/s best, {:.0} median, {:.3} ms",
        problem.heads_q,
        problem.seq_q,
        problem.head_dim,
        problem.dtypes,
        problem.band,
        gflops(times[0]),
        gflops(times[repeats / 2]),
        times[0] * 1e3
    );
}

fn main() {
    let threads =
        std::env::args().nth(1).and_then(|x| x.parse().ok()).unwrap_or(rayon::current_num_threads());
    let only: Option<String> = std::env::args().nth(2);
    for isa in
        Isa::available().into_iter().filter(|isa| only.as_deref().is_none_or(|name| name == isa.name()))
    {
        for (seq, dim, mask) in
            [(512, 64, Band::FULL), (2048, 64, Band::FULL), (2048, 64, Band::CAUSAL), (2048, 128, Band::FULL)]
        {
            let problem = Problem::new(1, 8, seq, dim, problem::DType::F32).with_band(mask);
            rate::<f32>(problem.clone(), threads, isa);
            rate::<bf16>(problem.clone(), threads, isa);
            rate::<f16>(problem, threads, isa);
        }
    }
}
