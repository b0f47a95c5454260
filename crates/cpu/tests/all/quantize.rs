//! Quantisation on threads: how the rows are divided, and how a call is stopped.

use std::sync::atomic::{AtomicUsize, Ordering};

use flashcore_cpu::{
    CallingThread, CpuError, Executor, Pool, Quantization, quantize_into, quantized_lengths,
};
use problem::{DType, Layout, Problem, ProblemError, Tensor};

/// Runs on one thread. Counts the checks whether to stop, and stops at one of them.
struct Asked {
    threads: usize,
    asked: AtomicUsize,
    stop_at: usize,
    shared_by: AtomicUsize,
}

impl Asked {
    fn new(threads: usize, stop_at: usize) -> Asked {
        Asked { threads, asked: AtomicUsize::new(0), stop_at, shared_by: AtomicUsize::new(0) }
    }
}

impl Executor for Asked {
    fn threads(&self) -> usize {
        self.threads
    }

    fn run(&self, threads: usize, work: &(dyn Fn() + Sync)) {
        self.shared_by.fetch_max(threads, Ordering::Relaxed);
        CallingThread.run(threads, work);
    }

    fn is_stopped(&self) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed) >= self.stop_at
    }
}

fn options(rows: Option<u32>, hadamard: Option<u64>, smooth_keys: bool) -> Quantization {
    Quantization { rows, hadamard, smooth_keys, ..Quantization::per_head(DType::E4m3) }
}

type Codes = (Vec<u8>, Vec<u32>);

fn quantized(
    executor: &dyn Executor,
    problem: &Problem,
    tensor: Tensor,
    options: &Quantization,
) -> Result<Codes, CpuError> {
    let elements = problem.span(tensor).unwrap().0;
    let data: Vec<f32> = (0..elements).map(|i| ((i * 7919 + 13) % 10007) as f32 / 999.0 - 3.0).collect();
    let [codes, factors] = quantized_lengths(problem, tensor, options);
    let (mut codes, mut factors) = (vec![0xff; codes], vec![f32::NAN; factors]);
    let to = (&mut codes[..], &mut factors[..]);
    quantize_into(executor, problem, tensor, data[..].into(), options, to)?;
    Ok((codes, factors.into_iter().map(f32::to_bits).collect()))
}

#[test]
fn codes_do_not_depend_on_the_number_of_threads() {
    let problem = Problem::new(2, 4, 1500, 96, DType::F32).with_heads_kv(2, Layout::Bshd);
    for (rows, hadamard, smooth) in
        [(None, None, false), (Some(64), None, true), (None, Some(3), true), (Some(128), Some(3), false)]
    {
        for tensor in [Tensor::Q, Tensor::K, Tensor::V] {
            let options = options(rows, hadamard, smooth);
            let on = |threads| quantized(&Pool::new(threads).unwrap(), &problem, tensor, &options).unwrap();
            let alone = quantized(&CallingThread, &problem, tensor, &options).unwrap();
            for threads in [2, 3, 8] {
                assert!(on(threads) == alone, "{tensor:?} {options:?} on {threads} threads");
            }
        }
    }
}

/// One head: its rows are divided over the threads, and a thread checks whether to stop after each 2^16
/// elements.
#[test]
fn the_rows_of_one_head_are_divided_and_stopped() {
    let problem = Problem::new(1, 1, 1 << 14, 64, DType::F32);
    for smooth in [false, true] {
        let options = options(None, None, smooth);
        let run = |executor: &Asked| quantized(executor, &problem, Tensor::K, &options);
        let whole = Asked::new(5, usize::MAX);
        run(&whole).unwrap();
        let asked = whole.asked.into_inner();
        assert_eq!((whole.shared_by.into_inner(), asked), (5, if smooth { 64 } else { 32 }));
        for stop_at in [0, 7, asked - 1] {
            let stopped = Asked::new(5, stop_at);
            assert_eq!(run(&stopped), Err(CpuError::Stopped));
            assert_eq!(stopped.asked.into_inner(), stop_at + 1, "no more is computed");
        }
    }
}

#[test]
fn short_memory_is_refused() {
    let problem = Problem::new(1, 2, 3, 16, DType::F32);
    let options = options(None, None, false);
    let data = vec![1.0f32; 96];
    let into = |codes: usize, factors: usize| {
        let (mut codes, mut factors) = (vec![0; codes], vec![0.0; factors]);
        let to = (&mut codes[..], &mut factors[..]);
        quantize_into(&CallingThread, &problem, Tensor::V, data[..].into(), &options, to)
    };
    let short = |argument, len, needed| {
        Err(CpuError::Problem(ProblemError::OperandTooShort { argument, len, needed }))
    };
    assert_eq!(
        [into(96, 2), into(95, 2), into(96, 1)],
        [Ok(()), short("codes", 95, 96), short("factors", 1, 2)]
    );
}

#[test]
fn a_tensor_without_rows_is_quantised() {
    let problem = Problem::new(1, 2, 3, 16, DType::F32).with_seq_kv(0, Layout::Bhsd);
    for (tensor, rows) in [(Tensor::K, None), (Tensor::V, None), (Tensor::K, Some(64))] {
        let options = options(rows, Some(1), tensor == Tensor::K);
        let factors = if rows.is_none() { vec![1f32.to_bits(); 2] } else { Vec::new() };
        let result = quantized(&CallingThread, &problem, tensor, &options);
        assert_eq!(result, Ok((Vec::new(), factors)), "{tensor:?}");
    }
}
