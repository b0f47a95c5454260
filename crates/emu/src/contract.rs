//! Checks a launch before it runs: the contract, tensor maps, the cluster, and the limits of the emulator.

use ptx::{Arg, Function, Kernel, Op};

use crate::EmuError;
use crate::decode::Program;
use crate::exec::{Context, REGISTERS};
use crate::memory::Buffer;
use crate::order::DenseShadow;

/// Bytes that the race check may use for the shadow of a cluster's shared memory.
const SHADOW_LIMIT: u64 = 4 << 30;

pub(crate) fn check_contract<'k>(
    kernel: &'k Kernel,
    buffers: &[&mut Buffer],
) -> Result<&'k Function, EmuError> {
    let entry =
        kernel.module.entries().find(|f| *f.name == *kernel.entry).ok_or_else(|| EmuError::NoEntry {
            name: kernel.entry.clone(),
            available: kernel.module.entries().map(|f| f.name.to_string()).collect(),
        })?;
    if entry.params.len() != kernel.args.len() {
        return Err(EmuError::ArgumentCount {
            entry: kernel.entry.clone(),
            expected: entry.params.len(),
            given: kernel.args.len(),
        });
    }
    for (index, (param, arg)) in entry.params.iter().zip(&kernel.args).enumerate() {
        if param.bytes() != arg.bytes() {
            let name = param.name.to_string();
            return Err(EmuError::ArgumentSize { index, name, expected: param.bytes(), given: arg.bytes() });
        }
        let missing = arg.leaves().into_iter().find_map(|leaf| match leaf {
            Arg::Buffer { index, .. } if *index >= kernel.buffers.len() => Some(*index),
            _ => None,
        });
        if let Some(buffer) = missing {
            return Err(EmuError::NoSuchBuffer { index, buffer, buffers: kernel.buffers.len() });
        }
    }
    check_maps(kernel)?;
    if kernel.buffers.len() != buffers.len() {
        return Err(EmuError::BufferCount { expected: kernel.buffers.len(), given: buffers.len() });
    }
    for (spec, buffer) in kernel.buffers.iter().zip(buffers) {
        if buffer.len() < spec.bytes {
            let name = spec.name.clone();
            return Err(EmuError::BufferSize { name, expected: spec.bytes, given: buffer.len() });
        }
    }
    check_launch(kernel, entry)?;
    Ok(entry)
}

/// Checks the limits of compute capability 8.0 and later (CUDA C++ Programming Guide, "Compute
/// Capabilities").
fn check_launch(kernel: &Kernel, entry: &Function) -> Result<(), EmuError> {
    let launch = &kernel.launch;
    let wrong = |what, given: String, accepted: &str| {
        Err(EmuError::Launch { what, given, accepted: accepted.to_string() })
    };
    let (block, grid) = (launch.block, launch.grid);
    let threads = block.count();
    if threads == 0 || threads > 1024 || block.0 > 1024 || block.1 > 1024 || block.2 > 64 {
        return wrong("block", block.to_string(), "1 to 1024 threads, at most 64 of them in z");
    }
    if grid.count() == 0 || grid.0 > i32::MAX as u32 || grid.1 > 65535 || grid.2 > 65535 {
        return wrong("grid", grid.to_string(), "1 to 2147483647 CTAs in x, 1 to 65535 in y and z");
    }
    check_cluster(kernel, entry)?;
    let block = [block.0, block.1, block.2];
    if let Some(required) = entry.bounds.required_threads
        && required.map(|n| n.max(1)) != block
    {
        return wrong("block", launch.block.to_string(), &format!(".reqntid {required:?}"));
    }
    if let Some(max) = entry.bounds.max_threads
        && threads > max.iter().map(|n| u64::from((*n).max(1))).product()
    {
        return wrong("block", launch.block.to_string(), &format!("no more threads than .maxntid {max:?}"));
    }
    Ok(())
}

/// Checks that arguments name existing tensor maps, and that a GPU would accept the maps.
fn check_maps(kernel: &Kernel) -> Result<(), EmuError> {
    for arg in kernel.args.iter().flat_map(Arg::leaves) {
        if let Arg::TensorMap { index } = *arg
            && index >= kernel.tensor_maps.len()
        {
            let accepted = format!("one of the {} of the launch contract", kernel.tensor_maps.len());
            return Err(EmuError::Launch { what: "tensor map", given: index.to_string(), accepted });
        }
    }
    for (index, map) in kernel.tensor_maps.iter().enumerate() {
        map.check_in(&kernel.buffers).map_err(|error| EmuError::TensorMap { index, error })?;
        let row = map.box_extents[0] * map.element.bytes();
        if let Some(span) = map.swizzle.span().filter(|&span| span != row) {
            return Err(EmuError::Launch {
                what: "row of a swizzled box",
                given: format!("{row} bytes"),
                accepted: format!("{span} bytes: shorter rows are not implemented"),
            });
        }
    }
    Ok(())
}

/// Checks the limits of PTX ISA, "Cluster Dimension Directives", and CUDA C++ Programming Guide, "Thread
/// Block Clusters" (16 CTAs if the launch allows non-portable sizes).
fn check_cluster(kernel: &Kernel, entry: &Function) -> Result<(), EmuError> {
    let (cluster, grid, sm) = (kernel.launch.cluster, kernel.launch.grid, kernel.module.target.sm);
    let wrong =
        |accepted: String| Err(EmuError::Launch { what: "cluster", given: cluster.to_string(), accepted });
    let count = cluster.count();
    if count == 0 || count > 16 {
        return wrong("1 to 16 CTAs".into());
    }
    if count > 1 && sm < 90 {
        return wrong(format!("one CTA on sm_{sm}"));
    }
    let fits = [(grid.0, cluster.0), (grid.1, cluster.1), (grid.2, cluster.2)];
    if fits.iter().any(|(grid, cluster)| grid % cluster != 0) {
        return wrong(format!("divisors of the grid {grid}"));
    }
    match entry.bounds.required_cluster {
        Some(required) if required.map(|n| n.max(1)) != [cluster.0, cluster.1, cluster.2] => {
            wrong(format!(".reqnctapercluster {required:?}"))
        }
        _ => Ok(()),
    }
}

/// Checks that 32-bit numbers suffice for the agents of the race check.
pub(crate) fn check_agents(context: &Context) -> Result<(), EmuError> {
    let grid = context.launch.grid;
    let agents = (grid.count() / context.ranks()).saturating_mul(context.actors.total() as u64);
    if agents < u64::from(u32::MAX) {
        return Ok(());
    }
    let accepted = "fewer than 2^32 warps in all: use a smaller problem".into();
    Err(EmuError::Launch { what: "grid", given: grid.to_string(), accepted })
}

/// Checks that the shadow of a cluster's shared memory fits its limit.
pub(crate) fn check_shadow(context: &Context) -> Result<(), EmuError> {
    if shadow_bytes(context) <= SHADOW_LIMIT {
        return Ok(());
    }
    let (Program { layout, granules, .. }, launch) = (context.program, context.launch);
    let (ctas, threads) = (context.actors.ctas, launch.block.count());
    let (bytes, granule) = (layout.shared_bytes, granules[0]);
    Err(EmuError::Launch {
        what: "cluster",
        given: format!(
            "{ctas} CTAs of {threads} threads with {bytes} bytes of shared memory, accessed by {granule} bytes"
        ),
        accepted: format!(
            "fewer CTAs, threads or bytes, so that the race detector needs at most {SHADOW_LIMIT} bytes"
        ),
    })
}

/// The maximum size in bytes of the shadow of a cluster's shared memory.
pub(crate) fn shadow_bytes(context: &Context) -> u64 {
    let bytes = context.actors.ctas * context.program.layout.shared_extent as usize;
    DenseShadow::most_bytes(bytes, context.program.granules[0], context.actors)
}

/// Checks that an SM has the registers that the CTA needs at its start. `registers` are those of a thread,
/// where they are known: of kernels with `setmaxnreg`.
pub(crate) fn check_registers(context: &Context) -> Result<(), EmuError> {
    let uses = context.program.code.iter().any(|inst| matches!(inst.op, Op::Setmaxnreg(_)));
    let Some(registers) = context.registers.filter(|_| uses) else { return Ok(()) };
    let warps = context.actors.warps as u32;
    if registers * 32 * warps > REGISTERS {
        return Err(EmuError::Launch {
            what: "registers of a CTA",
            given: format!("{registers} for each thread of {warps} warps"),
            accepted: format!("at most {REGISTERS} together, on every GPU"),
        });
    }
    Ok(())
}

/// Checks the limit of shared memory per CTA (CUDA C++ Programming Guide, table of technical specifications).
pub(crate) fn check_shared(bytes: u32, sm: u32) -> Result<(), EmuError> {
    let limit = match sm {
        80 | 87 => 163 * 1024,
        0..=99 if sm < 90 => 99 * 1024,
        90..=119 => 227 * 1024,
        _ => 99 * 1024,
    };
    if bytes > limit {
        return Err(EmuError::Launch {
            what: "shared memory of a CTA",
            given: format!("{bytes} bytes"),
            accepted: format!("at most {limit} bytes on sm_{sm}"),
        });
    }
    Ok(())
}
