//! Occupancy: how many CTAs of a kernel fit on an SM.

use serde::Serialize;
use thiserror::Error;

use crate::Gpu;

/// The resource that limits the number of CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limiter {
    /// Registers.
    Registers,
    /// Shared memory.
    Shared,
    /// Warps (threads).
    Warps,
    /// The number of CTAs an SM can hold.
    Ctas,
}

/// The number of CTAs that an SM holds at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Occupancy {
    /// CTAs.
    pub ctas: u32,
    /// Warps of these CTAs.
    pub warps: u32,
    /// Fraction of the warps that the SM can hold.
    pub fraction: f64,
    /// The resource that limits the number of CTAs.
    pub limiter: Limiter,
    /// Allocated registers per thread.
    pub registers: u32,
    /// Allocated shared memory per CTA, in bytes.
    pub shared: u32,
}

/// Why not even one CTA fits.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OccupancyError {
    #[error("invalid value '{threads}' for the threads of a CTA: expected 1 to {limit}")]
    Threads { threads: u64, limit: u32 },
    #[error("{registers} registers per thread for {threads} threads exceed the {limit} registers of an SM")]
    Registers { registers: u32, threads: u32, limit: u32 },
    #[error("{bytes} bytes of shared memory per CTA exceed the {limit} bytes of the machine")]
    Shared { bytes: u32, limit: u32 },
}

/// Registers are allocated to a warp in units of 256 (CUDA occupancy calculator, sm_80 to sm_90).
const REGISTER_UNIT: u32 = 256;
/// Shared memory is allocated in units of 128 bytes (sm_80 and later).
const SHARED_UNIT: u32 = 128;

/// The number of CTAs of `threads` threads that fit on an SM, each with `registers` per thread and `shared`
/// bytes.
///
/// # Errors
/// Not even one CTA fits.
pub fn occupancy(gpu: &Gpu, threads: u64, registers: u32, shared: u32) -> Result<Occupancy, OccupancyError> {
    let limits = &gpu.limits;
    let count = u32::try_from(threads).ok().filter(|t| (1..=limits.threads_per_cta).contains(t));
    let Some(count) = count else {
        return Err(OccupancyError::Threads { threads, limit: limits.threads_per_cta });
    };
    if shared > gpu.memory.shared_per_cta {
        return Err(OccupancyError::Shared { bytes: shared, limit: gpu.memory.shared_per_cta });
    }
    let warps = count.div_ceil(32);
    let in_units = |size: u32, unit| size.checked_next_multiple_of(unit).unwrap_or(u32::MAX);
    let warp_registers = in_units(registers.max(1).saturating_mul(32), REGISTER_UNIT);
    // Each sub-partition has its own register file, and the warps of a CTA are distributed over them.
    let by_file = limits.registers / gpu.schedulers / warp_registers;
    let held = in_units(shared.saturating_add(gpu.memory.shared_reserved), SHARED_UNIT);
    let candidates = [
        (limits.warps / warps, Limiter::Warps),
        (limits.ctas, Limiter::Ctas),
        (by_file * gpu.schedulers / warps, Limiter::Registers),
        // Without shared memory, and on a machine that reserves none, shared memory is no limit.
        (gpu.memory.shared_bytes.checked_div(held).unwrap_or(u32::MAX), Limiter::Shared),
    ];
    let (ctas, limiter) = candidates.into_iter().min_by_key(|(n, _)| *n).unwrap_or((0, Limiter::Ctas));
    if ctas == 0 {
        return Err(match limiter {
            Limiter::Shared => OccupancyError::Shared { bytes: held, limit: gpu.memory.shared_bytes },
            Limiter::Warps => OccupancyError::Threads { threads, limit: limits.warps.saturating_mul(32) },
            Limiter::Registers | Limiter::Ctas => {
                OccupancyError::Registers { registers, threads: count, limit: limits.registers }
            }
        });
    }
    Ok(Occupancy {
        ctas,
        warps: ctas * warps,
        fraction: f64::from(ctas * warps) / f64::from(limits.warps),
        limiter,
        registers: warp_registers / 32,
        shared: held,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::{A100, H200, L4, Memories};

    #[test]
    fn each_limiter() {
        let of = |gpu, threads, registers, shared| {
            occupancy(gpu, threads, registers, shared).map(|o| (o.ctas, o.limiter))
        };
        assert_eq!(of(&L4, 128, 32, 0), Ok((12, Limiter::Warps)));
        assert_eq!(of(&L4, 32, 32, 0), Ok((24, Limiter::Ctas)));
        assert_eq!(of(&L4, 128, 48, 21 << 10), Ok((4, Limiter::Shared)));
        assert_eq!(of(&H200, 128, 168, 0), Ok((3, Limiter::Registers)));
        assert_eq!(of(&A100, 256, 255, 0), Ok((1, Limiter::Registers)));
        assert_eq!(of(&A100, 128, 33, 0), Ok((12, Limiter::Registers)), "33 registers are 40");
        assert_eq!(of(&L4, 128, 32, 99 << 10), Ok((1, Limiter::Shared)));
    }

    #[test]
    fn any_reserved_shared_memory_is_counted() {
        let reserving = |shared_reserved| Gpu { memory: Memories { shared_reserved, ..L4.memory }, ..L4 };
        let of = |gpu: &Gpu, shared| occupancy(gpu, 128, 32, shared).map(|o| (o.ctas, o.limiter));
        assert_eq!(of(&reserving(0), 0), Ok((12, Limiter::Warps)));
        assert_eq!(of(&reserving(0), 50 << 10), Ok((2, Limiter::Shared)));
        for reserved in [u32::MAX, u32::MAX - 128, L4.memory.shared_bytes + 1] {
            let none = of(&reserving(reserved), 128);
            assert!(matches!(none, Err(OccupancyError::Shared { .. })), "{reserved}: {none:?}");
        }
        assert!(matches!(occupancy(&L4, 128, u32::MAX, 0), Err(OccupancyError::Registers { .. })));
    }

    #[test]
    fn what_does_not_fit_is_said() {
        assert!(matches!(occupancy(&L4, 2048, 32, 0), Err(OccupancyError::Threads { .. })));
        assert!(matches!(occupancy(&L4, 0, 32, 0), Err(OccupancyError::Threads { .. })));
        assert!(matches!(occupancy(&L4, 1024, 128, 0), Err(OccupancyError::Registers { .. })));
        assert!(matches!(occupancy(&L4, 128, 32, 100 << 10), Err(OccupancyError::Shared { .. })));
    }
}
