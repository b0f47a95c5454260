//! Tests of executors: the threads that a call uses, and how a call is stopped.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use flashcore_cpu::{CallingThread, CpuError, CpuPlan, Executor, Input, Isa, Pool, attention, attention_on};
use problem::{DType, Layout, Problem};

/// Calls a function each time that a thread checks whether to stop.
struct Asked<F>(F);

impl<F: Fn() -> bool + Sync> Executor for Asked<F> {
    fn threads(&self) -> usize {
        1
    }

    fn run(&self, threads: usize, work: &(dyn Fn() + Sync)) {
        CallingThread.run(threads, work);
    }

    fn is_stopped(&self) -> bool {
        (self.0)()
    }
}

/// One row of one head, with enough keys for several milliseconds.
fn long() -> Problem {
    Problem::new(1, 1, 1, 64, DType::F32).with_seq_kv(1 << 19, Layout::Bhsd)
}

fn computed(executor: &dyn Executor, problem: &Problem, isa: Isa) -> Result<Vec<f32>, CpuError> {
    let keys: Vec<f32> = (0..problem.seq_kv * 64).map(|i| (i % 13) as f32 / 13.0).collect();
    let queries: Vec<f32> = (0..problem.seq_q * 64).map(|i| (i % 7) as f32 / 7.0).collect();
    let mut out = vec![0.0; problem.seq_q * 64];
    let plan = CpuPlan { threads: 1, splits: 1, ..CpuPlan::with_isa(problem, isa) };
    attention_on(executor, problem, [&queries[..], &keys, &keys].map(Input::from), &mut out, None, &plan)?;
    Ok(out)
}

#[test]
fn a_thread_asks_again_and_again_within_one_task() {
    for isa in Isa::available() {
        let asked = AtomicUsize::new(0);
        let count = || {
            asked.fetch_add(1, Ordering::Relaxed);
            false
        };
        let out = computed(&Asked(count), &long(), isa).unwrap();
        assert!(out.iter().all(|x| (0.0..1.0).contains(x)));
        // One check before the task, one after the last task and one at the end. Within the task there are
        // 2²⁶ / 2²⁴ = 4 stretches, with a check between each.
        assert_eq!(asked.into_inner(), 3 + 3, "{isa}");
    }
}

#[test]
fn a_stopped_call_says_so() {
    for isa in Isa::available() {
        for at in [0, 2] {
            let asked = AtomicUsize::new(0);
            let stop = || asked.fetch_add(1, Ordering::Relaxed) >= at;
            assert_eq!(computed(&Asked(stop), &long(), isa), Err(CpuError::Stopped), "{isa}");
            assert!(asked.into_inner() <= at + 3, "no more is computed");
        }
    }
}

#[test]
fn a_thread_may_compute_another_problem_when_it_asks() {
    let short = Problem::new(1, 1, 40, 64, DType::F32);
    for isa in Isa::available() {
        let inside = AtomicBool::new(false);
        let expected = (computed(&CallingThread, &long(), isa), computed(&CallingThread, &short, isa));
        let nested = || {
            if !inside.swap(true, Ordering::Relaxed) {
                assert_eq!(computed(&CallingThread, &short, isa), expected.1, "{isa}");
                inside.store(false, Ordering::Relaxed);
            }
            false
        };
        assert_eq!(computed(&Asked(nested), &long(), isa), expected.0, "{isa}");
    }
}

#[test]
fn calls_leave_rayons_global_pool_alone() {
    let problem = Problem::new(1, 4, 256, 64, DType::F32);
    let x = vec![0.5f32; 4 * 256 * 64];
    let mut out = vec![0.0; x.len()];
    let plan = CpuPlan { threads: 2, ..CpuPlan::for_problem(&problem) };
    attention(&problem, &x, &x, &x, &mut out, None, &plan).unwrap();
    assert!(out.iter().all(|x| (x - 0.5).abs() < 1e-5));
    // A global pool can be created only if none has been started.
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global().unwrap();
}

/// The plan decides the bits, with or without a split of the keys, and not the number of threads that share
/// its tasks or the order in which they end. The default plan of another number of threads may split the keys
/// otherwise.
#[test]
fn a_plan_has_the_same_bits_on_every_number_of_threads() {
    for (heads, rows, keys) in [(8, 1, 1500), (4, 40, 1100), (2, 150, 300)] {
        let problem = Problem::new(1, heads, rows, 64, DType::F32).with_seq_kv(keys, Layout::Bhsd);
        let number = |i: usize| ((i * 7919 + 13) % 10007) as f32 / 2500.0 - 2.0;
        let kv: Vec<f32> = (0..heads * keys * 64).map(number).collect();
        let q: Vec<f32> = (0..heads * rows * 64).map(|i| number(i + 5)).collect();
        for splits in [1, 3, 4] {
            let on = |executor: &dyn Executor, threads| {
                let plan = CpuPlan { threads, splits, ..CpuPlan::for_threads(&problem, 2) };
                let mut out = vec![0.0f32; q.len()];
                let inputs = [&q[..], &kv, &kv].map(Input::from);
                attention_on(executor, &problem, inputs, &mut out, None, &plan).unwrap();
                out.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
            };
            let alone = on(&CallingThread, 1);
            for threads in [2, 3, 8] {
                let shared = on(&Pool::new(threads).unwrap(), threads);
                assert!(shared == alone, "{heads}, {rows}x{keys}, {splits} splits, {threads} threads");
            }
        }
    }
}
