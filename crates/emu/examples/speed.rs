//! Measures the emulator with all checks: thread instructions per second on the fused attention kernel of the
//! corpus, for the reference problem (batch 1, 8 heads, 512 × 64, f16).
//!
//! Run with `cargo run --release -p flashcore-emu --example speed`; set `RAYON_NUM_THREADS=1` for the rate of
//! one core.

use std::time::Instant;

use flashcore_emu::{Buffer, Options, run};
use half::f16;
use ptx::{Access, Arg, BufferSpec, Dim3, Kernel, Launch};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let text = std::fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../filetests/corpus/cuda_flash_sm80.ptx"
    ))?;
    let bytes = 8 * 512 * 64 * 2;
    let spec = |name: &str, access| BufferSpec { name: name.into(), bytes, access };
    let buffers = vec![
        spec("q", Access::Read),
        spec("k", Access::Read),
        spec("v", Access::Read),
        spec("out", Access::Write),
    ];
    let pointers = (0..4).map(|index| Arg::Buffer { index, offset: 0 });
    let scalars = [Arg::I32(512), Arg::I32(512), Arg::F32(0.125), Arg::I32(0)];
    let kernel = Kernel {
        module: ptx::parse(&text)?.verify()?,
        entry: "flash".into(),
        launch: Launch {
            grid: Dim3(8, 8, 1),
            cluster: Dim3(1, 1, 1),
            block: Dim3(128, 1, 1),
            dynamic_shared: 3 * 64 * 72 * 2,
            overlapping: false,
        },
        buffers,
        tensor_maps: Vec::new(),
        args: pointers.chain(scalars).collect(),
    };
    let data: Vec<u8> = (0..bytes as u32 / 2)
        .flat_map(|i| {
            f16::from_f32((i.wrapping_mul(2_654_435_761) >> 16) as f32 / 32768.0 - 1.0).to_le_bytes()
        })
        .collect();
    for _ in 0..5 {
        let mut memory: Vec<Buffer> = (0..3).map(|_| Buffer::from_bytes(&data)).collect();
        memory.push(Buffer::uninitialised(bytes));
        let start = Instant::now();
        let report = run(&kernel, &mut memory.iter_mut().collect::<Vec<_>>(), &Options::default())?;
        let seconds = start.elapsed().as_secs_f64();
        let lanes: u64 = report.counters.instructions.iter().map(|c| c.lanes).sum();
        println!(
            "{:.0} ms, {} warp instructions, {:.0} M thread instructions/s, {} findings",
            1e3 * seconds,
            report.steps,
            lanes as f64 / seconds / 1e6,
            report.hazards.len()
        );
    }
    Ok(())
}
