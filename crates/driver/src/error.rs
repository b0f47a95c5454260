//! The error type of this crate.

use std::fmt;
use std::time::Duration;

/// Errors of the CUDA driver and of this crate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The driver's library is not installed.
    #[error("no CUDA driver on this machine (libcuda is not found); install the NVIDIA driver to use a GPU")]
    NoDriver,
    /// The driver is older than this crate requires.
    #[error(
        "the CUDA driver supports CUDA {}, needed is {} or later; update the NVIDIA driver",
        Version(*found),
        Version(*needed)
    )]
    DriverTooOld {
        /// The version of the driver: 12040 for 12.4.
        found: i32,
        /// The minimum version.
        needed: i32,
    },
    /// The library lacks a function that its version should contain.
    #[error("the CUDA driver library lacks {name}, which is part of CUDA {}; the installation is \
    damaged", Version(*version))]
    MissingSymbol {
        /// The function.
        name: &'static str,
        /// The version that the library reports.
        version: i32,
    },
    /// The driver sees no device with this ordinal.
    #[error("device {ordinal} does not exist; the driver sees {count} device(s)")]
    NoDevice {
        /// The requested ordinal.
        ordinal: i32,
        /// Number of devices.
        count: i32,
    },
    /// This process was forked from one that had used CUDA. The driver does not work in such a child.
    #[error(
        "CUDA was initialised before this process was forked, and does not work in a forked child; start \
        processes that use the GPU with `spawn` or `forkserver`, or fork before the first use of the GPU"
    )]
    Forked,
    /// The system or the driver denies access.
    #[error("{what} is not permitted: {message}; ask for access to the device")]
    NoPermission {
        /// The driver's function, or the device file.
        what: String,
        /// The reason.
        message: String,
    },
    /// Device or pinned memory is exhausted.
    #[error("out of memory: {what}")]
    OutOfMemory {
        /// The requested memory.
        what: String,
    },
    /// A kernel or the hardware failed in a way that makes the GPU unusable for the process (CUDA Driver API,
    /// `CUresult`: "the process must be terminated and relaunched").
    #[error(
        "the GPU context is unusable after {cause} (reported by {call}); restart the process to use this \
        GPU again"
    )]
    Poisoned {
        /// The call that first returned the error.
        call: &'static str,
        /// The driver's error name and text.
        cause: String,
    },
    /// A driver call failed.
    #[error("{call} failed: {message}")]
    Call {
        /// The driver's function.
        call: &'static str,
        /// The driver's error name and text.
        message: String,
    },
    /// The driver's compiler rejected the module.
    #[error("the driver's compiler rejected the module for {target}: {log}")]
    Compile {
        /// The module's target.
        target: String,
        /// The compiler's log.
        log: String,
    },
    /// The compiled kernel exceeds the resources that the plan promised.
    #[error(
        "{entry} needs more than its plan states: invalid value '{found}' for {what}: expected at most {accepted}"
    )]
    Admission {
        /// Name of the kernel.
        entry: String,
        /// The resource.
        what: &'static str,
        /// The kernel's value.
        found: u64,
        /// The maximum.
        accepted: u64,
    },
    /// The launch contract does not match the entry, the device or the caller's buffers.
    #[error("launch of {entry}: {reason}")]
    Contract {
        /// Name of the kernel.
        entry: String,
        /// The mismatch in words.
        reason: String,
    },
    /// A copy is longer than its buffer.
    #[error("copy of {bytes} bytes does not fit a buffer of {room} bytes")]
    Copy {
        /// Bytes requested.
        bytes: usize,
        /// The buffer's size.
        room: usize,
    },
    /// Objects of different contexts were used together.
    #[error("{what} belongs to device {found}, but the call is for device {expected}")]
    OtherDevice {
        /// The argument.
        what: &'static str,
        /// The device of the argument.
        found: i32,
        /// The device of the call.
        expected: i32,
    },
    /// NCCL is not installed.
    #[error(
        "no NCCL on this machine (libnccl.so.2 is not found); install it, or add its folder to LD_LIBRARY_PATH"
    )]
    NoNccl,
    /// NCCL is older than this crate requires.
    #[error(
        "NCCL {} is installed, needed is {} or later; update the library",
        NcclVersion(*found),
        NcclVersion(*needed)
    )]
    NcclTooOld {
        /// The version of the library: 22705 for 2.27.5.
        found: i32,
        /// The minimum version.
        needed: i32,
    },
    /// A call of NCCL failed.
    #[error("{call} failed: {message}")]
    Nccl {
        /// NCCL's function.
        call: &'static str,
        /// NCCL's text of the error.
        message: String,
    },
    /// Other ranks of a group did not answer within the time-out.
    #[error("rank {rank} has waited for other ranks in {call} for {time_out:?}, the time-out of the group")]
    GroupTimedOut {
        /// This rank.
        rank: usize,
        /// The call in which it has waited.
        call: &'static str,
        /// The time-out.
        time_out: Duration,
    },
    /// A tensor map that the hardware does not support.
    #[error(transparent)]
    TensorMap(ptx::TensorMapError),
}

/// The start of the cause when a kernel did not end within its time limit.
pub(crate) const NEVER_ENDS: &str = "a kernel did not end";

impl DriverError {
    /// Whether the error is a kernel that did not end within its time limit.
    pub fn is_hang(&self) -> bool {
        matches!(self, DriverError::Poisoned { cause, .. } if cause.starts_with(NEVER_ENDS))
    }
}

/// A CUDA version in the driver's encoding: 12040 is 12.4.
struct Version(i32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// A version in NCCL's encoding: 22705 is 2.27.5.
struct NcclVersion(i32);

impl fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0 / 10000, self.0 % 10000 / 100, self.0 % 100)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_driver_is_told_what_is_needed() {
        let text = DriverError::DriverTooOld { found: 11040, needed: 12000 }.to_string();
        assert_eq!(
            text,
            "the CUDA driver supports CUDA 11.4, needed is 12.0 or later; update the NVIDIA driver"
        );
    }
}
