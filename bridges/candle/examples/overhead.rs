//! The time that a call takes on the host, beside that of launching an empty kernel through candle.
//!
//! ```sh
//! cargo run --release --features cuda --example overhead
//! ```
#![allow(unsafe_code, reason = "candle launches kernels of others by unsafe calls")]

use std::time::{Duration, Instant};

use candle::cuda_backend::cudarc::driver::LaunchConfig;
use candle::{DType, Device, Error, Result, Tensor};
use candle_flashcore::flash_attn;

const EMPTY: &str = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry empty() { ret; }\n";
/// Calls between two waits for the device, fewer than its queue holds.
const CALLS: u32 = 200;
const REPEATS: usize = 51;

/// The median time of one of [`CALLS`] calls on the host.
fn host_time(device: &Device, mut call: impl FnMut() -> Result<()>) -> Result<Duration> {
    let mut times = Vec::with_capacity(REPEATS);
    for _ in 0..REPEATS {
        device.synchronize()?;
        let start = Instant::now();
        for _ in 0..CALLS {
            call()?;
        }
        times.push(start.elapsed() / CALLS);
    }
    times.sort();
    Ok(times[REPEATS / 2])
}

fn main() -> Result<()> {
    let device = Device::new_cuda(0)?;
    let cuda = device.as_cuda_device()?;
    let empty = cuda.get_or_load_custom_func("empty", "empty", EMPTY)?;
    let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
    let of_empty = host_time(&device, || {
        // SAFETY: the kernel has no arguments and does nothing.
        unsafe { empty.builder().launch(config) }.map_err(Error::wrap)?;
        Ok(())
    })?;
    let [q, k, v] = [0, 1, 2].map(|_| Tensor::zeros((1, 1, 8, 64), DType::F16, &device));
    let (q, k, v) = (q?, k?, v?);
    let of_call = host_time(&device, || flash_attn(&q, &k, &v, 0.125, true).map(drop))?;
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    println!(
        "a call takes {:.2} us on the host, launching an empty kernel {:.2} us",
        micros(of_call),
        micros(of_empty)
    );
    Ok(())
}
