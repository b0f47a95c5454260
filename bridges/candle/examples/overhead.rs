//! The time that a call takes on the host above that of launching an empty kernel through candle, alone and
//! in an operation with an output, and the largest difference of its output from the CPU's.
//!
//! ```sh
//! cargo run --release --features cuda --example overhead
//! ```
//!
//! Each line that begins with `MEASURE` is a measurement, which `cargo xtask measure host ROWS.jsonl PROGRAM`
//! keeps.
#![allow(unsafe_code, reason = "candle launches kernels of others by unsafe calls")]

use std::sync::Arc;
use std::time::Instant;

use candle::backend::BackendStorage;
use candle::cuda_backend::cudarc::driver::{CudaFunction, LaunchConfig};
use candle::{
    CpuStorage, CudaDevice, CudaStorage, CustomOp3, DType, Device, Error, Layout, Result, Shape, Tensor, Var,
    bail,
};
use candle_flashcore::flash_attn;
use half::f16;

const EMPTY: &str = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry empty() { ret; }\n";
/// Calls between two waits for the device, fewer than its queue holds.
const CALLS: u32 = 200;
const REPEATS: usize = 51;

/// Launches an empty kernel.
fn launch(device: &CudaDevice, empty: &CudaFunction) -> Result<()> {
    let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the kernel has no arguments and does nothing.
    unsafe { device.cuda_stream().launch_builder(empty).launch(config) }.map_err(Error::wrap)?;
    Ok(())
}

/// An operation of candle on three tensors with an output of f16, which candle allocates and frees. Its
/// kernel is empty.
struct Empty(CudaFunction);

impl CustomOp3 for Empty {
    fn name(&self) -> &'static str {
        "empty"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        bail!("the operation is for CUDA devices")
    }

    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (device, shape) = (q.device(), q_layout.shape().clone());
        // SAFETY: no one reads the output.
        let out = unsafe { device.alloc::<f16>(shape.elem_count())? };
        launch(device, &self.0)?;
        Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), shape))
    }
}

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
    let empty = || {
        cuda.get_or_load_custom_func("empty", "empty", EMPTY).map(|function| function.into_cuda_function())
    };
    let (alone, empty) = (empty()?, Arc::new(Box::new(Empty(empty()?)) as Box<_>));
    let [q, k, v] = [0, 1, 2].map(|_| Tensor::zeros((1, 1, 8, 64), DType::F16, &device));
    let (q, k, v) = (q?, k?, v?);
    let mut calls: [(&str, &mut dyn FnMut() -> Result<()>); 4] = [
        ("candle: flash_attn", &mut || flash_attn(&q, &k, &v, 0.125, true).map(drop)),
        ("candle: an empty kernel", &mut || launch(cuda, &alone)),
        ("candle: an empty operation", &mut || q.apply_op3_arc(&k, &v, Arc::clone(&empty)).map(drop)),
        ("candle: a copy of a tensor", &mut || q.copy().map(drop)),
    ];
    for (_, call) in &mut calls {
        host_time(&device, call)?;
    }
    let mut samples = [const { Vec::new() }; 4];
    for _ in 0..REPEATS {
        for (samples, (_, call)) in samples.iter_mut().zip(&mut calls) {
            samples.push(host_time(&device, call)?);
        }
    }
    for (samples, (name, _)) in samples.iter().zip(&calls) {
        tell(name, samples);
    }
    for (other, name) in [(&samples[1], calls[1].0), (&samples[2], calls[2].0)] {
        let above: Vec<f64> = samples[0].iter().zip(other).map(|(ours, other)| ours - other).collect();
        tell(&name.replace("candle: ", "candle: flash_attn above "), &above);
    }
    if largest < 1e-2 { Ok(()) } else { Err(Error::msg("GPU and CPU differ")) }
}
