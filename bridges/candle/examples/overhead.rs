//! The time that a call takes on the host above that of launching an empty kernel through candle, and the
//! largest difference of its output from the CPU's.
//!
//! ```sh
//! cargo run --release --features cuda --example overhead
//! ```
//!
//! Each line that begins with `MEASURE` is a measurement, which `cargo xtask measure host ROWS.jsonl PROGRAM`
//! keeps.
#![allow(unsafe_code, reason = "candle launches kernels of others by unsafe calls")]

use std::time::Instant;

use candle::cuda_backend::cudarc::driver::LaunchConfig;
use candle::{DType, Device, Error, Result, Tensor, Var};
use candle_flashcore::flash_attn;

const EMPTY: &str = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry empty() { ret; }\n";
/// Calls between two waits for the device, fewer than its queue holds.
const CALLS: u32 = 200;
const REPEATS: usize = 51;

/// The time of one of [`CALLS`] calls on the host, in microseconds.
fn host_time(device: &Device, call: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
    device.synchronize()?;
    let start = Instant::now();
    for _ in 0..CALLS {
        call()?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS))
}

fn tell(name: &str, samples: &[f64]) {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (median, worst) = (sorted[sorted.len() / 2], sorted[sorted.len() - 1]);
    let calls = CALLS as usize * REPEATS;
    println!(
        "MEASURE {{\"measure\": \"{name}\", \"unit\": \"us\", \"calls\": {calls}, \"median\": {median:.4}, \
         \"p99\": {worst:.4}, \"samples\": {samples:.4?}}}"
    );
}

/// The largest difference between results of the GPU and of the CPU, of the output and of the gradients, in
/// f16.
fn difference(device: &Device) -> Result<f32> {
    let host = [8, 2, 2].map(|heads| Tensor::randn(0f32, 1f32, (2, 100, heads, 64), &Device::Cpu));
    let host: Vec<Tensor> = host.into_iter().map(|x| x?.to_dtype(DType::F16)).collect::<Result<_>>()?;
    let results = [&Device::Cpu, device].map(|on| -> Result<Vec<Tensor>> {
        let inputs: Vec<Var> =
            host.iter().map(|x| Var::from_tensor(&x.to_device(on)?)).collect::<Result<_>>()?;
        let out = flash_attn(&inputs[0], &inputs[1], &inputs[2], 0.125, true)?;
        let gradients = out.sqr()?.sum_all()?.backward()?;
        let of = |input: &Var| gradients.get(input).cloned().ok_or_else(|| Error::msg("no gradient"));
        std::iter::once(Ok(out)).chain(inputs.iter().map(of)).collect()
    });
    let [cpu, gpu] = results;
    let mut largest = 0f32;
    for (cpu, gpu) in cpu?.iter().zip(&gpu?) {
        let [cpu, gpu] = [cpu.clone(), gpu.to_device(&Device::Cpu)?].map(|x| x.to_dtype(DType::F32));
        let (cpu, gpu) = (cpu?, gpu?);
        let difference = (&cpu - gpu)?.abs()?.max_all()?.to_scalar::<f32>()?;
        largest = largest.max(difference / cpu.abs()?.max_all()?.to_scalar::<f32>()?);
    }
    Ok(largest)
}

fn main() -> Result<()> {
    let device = Device::new_cuda(0)?;
    let largest = difference(&device)?;
    println!("the largest difference between GPU and CPU is {largest:.1e} of the largest value");
    let cuda = device.as_cuda_device()?;
    let empty = cuda.get_or_load_custom_func("empty", "empty", EMPTY)?;
    let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
    let [q, k, v] = [0, 1, 2].map(|_| Tensor::zeros((1, 1, 8, 64), DType::F16, &device));
    let (q, k, v) = (q?, k?, v?);
    let mut launch = || {
        // SAFETY: the kernel has no arguments and does nothing.
        unsafe { empty.builder().launch(config) }.map_err(Error::wrap)?;
        Ok(())
    };
    let mut call = || flash_attn(&q, &k, &v, 0.125, true).map(drop);
    // An operation of candle has an output too, which candle allocates.
    let mut copy = || q.copy().map(drop);
    for warm in [&mut launch as &mut dyn FnMut() -> Result<()>, &mut call, &mut copy] {
        host_time(&device, warm)?;
    }
    let mut samples = [const { Vec::new() }; 4];
    for _ in 0..REPEATS {
        let (ours, nothing) = (host_time(&device, &mut call)?, host_time(&device, &mut launch)?);
        let copied = host_time(&device, &mut copy)?;
        for (samples, sample) in samples.iter_mut().zip([ours, nothing, ours - nothing, copied]) {
            samples.push(sample);
        }
    }
    tell("candle: flash_attn", &samples[0]);
    tell("candle: an empty kernel", &samples[1]);
    tell("candle: flash_attn above an empty kernel", &samples[2]);
    tell("candle: a copy of a tensor", &samples[3]);
    if largest < 1e-2 { Ok(()) } else { Err(Error::msg("GPU and CPU differ")) }
}
