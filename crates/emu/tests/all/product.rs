//! Runs kernels that multiply two inputs into an output.

use flashcore_emu::{Buffer, Options, run};
use ptx::{Access, Arg, BufferSpec, Kernel, Launch};

/// The words of the output of the kernel `k`, which takes the addresses of both inputs and of the output. The
/// run has no hazard, and its products have that many floating-point operations.
pub fn words(
    source: &str,
    launch: Launch,
    inputs: [(&str, Vec<u8>); 2],
    bytes: usize,
    flop: usize,
) -> Vec<u32> {
    let module = ptx::parse(source).unwrap_or_else(|e| panic!("{e}\n{source}"));
    let mut buffers: Vec<Buffer> = inputs.iter().map(|(_, bytes)| Buffer::from_bytes(bytes)).collect();
    buffers.push(Buffer::uninitialised(bytes));
    let inputs = inputs.iter().map(|(name, input)| (*name, input.len(), Access::Read));
    let spec = |(name, bytes, access): (&str, _, _)| BufferSpec { name: name.into(), bytes, access };
    let kernel = Kernel {
        module: module.verify().unwrap_or_else(|e| panic!("{e}")),
        entry: "k".into(),
        launch,
        buffers: inputs.chain([("out", bytes, Access::Write)]).map(spec).collect(),
        tensor_maps: Vec::new(),
        args: (0..3).map(|index| Arg::Buffer { index, offset: 0 }).collect(),
    };
    let report = run(&kernel, &mut buffers.iter_mut().collect::<Vec<_>>(), &Options::default())
        .unwrap_or_else(|e| panic!("{e}\n{source}"));
    assert!(report.hazards.is_empty(), "{}\n{source}", report.hazards[0]);
    let found: u64 = report.counters.instructions.iter().map(|c| c.tensor_flop).sum();
    assert_eq!(found, flop as u64);
    buffers[2].to_bytes().chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect()
}

/// The bits of an integer up to 4 in a format with `exponent` and `fraction` bits.
pub fn small(x: i32, exponent: u32, fraction: u32) -> u32 {
    let bias = (1 << (exponent - 1)) - 1;
    let sign = u32::from(x < 0) << (exponent + fraction);
    match x.unsigned_abs() {
        0 => 0,
        1 => sign | bias << fraction,
        2 => sign | (bias + 1) << fraction,
        3 => sign | (bias + 1) << fraction | 1 << (fraction - 1),
        _ => sign | (bias + 2) << fraction,
    }
}
