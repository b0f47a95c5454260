use std::fmt;

/// What can go wrong between us and the GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// The driver library is not there.
    #[error("no CUDA driver on this machine (libcuda is not found); install the NVIDIA driver to use a GPU")]
    NoDriver,
    /// The driver is older than what this crate calls.
    #[error(
        "the CUDA driver supports CUDA {}, needed is {} or later; update the NVIDIA driver",
        Version(*found),
        Version(*needed)
    )]
    DriverTooOld {
        /// What the driver says: 12040 for 12.4.
        found: i32,
        /// The least that is accepted.
        needed: i32,
    },
    /// The library lacks a function that its version should have.
    #[error("the CUDA driver library lacks {name}, which CUDA {} has; the installation is damaged", Version(*version))]
    MissingSymbol {
        /// The function.
        name: &'static str,
        /// The version that the library claims.
        version: i32,
    },
    /// The driver sees no such device.
    #[error("device {ordinal} does not exist; the driver sees {count} device(s)")]
    NoDevice {
        /// What was asked for.
        ordinal: i32,
        /// How many there are.
        count: i32,
    },
    /// The process is a child of one that used CUDA, made by `fork`: the driver does not work there.
    #[error(
        "CUDA was started before this process was forked, and does not work in a forked child; start processes \
         that use the GPU with `spawn` or `forkserver`, or fork before the first use of the GPU"
    )]
    Forked,
    /// The system or the driver does not let us.
    #[error("{what} is not permitted: {message}; ask for access to the device")]
    NoPermission {
        /// The driver's function, or the device file.
        what: String,
        /// Why.
        message: String,
    },
    /// Device or pinned memory is used up.
    #[error("out of memory: {what}")]
    OutOfMemory {
        /// What was asked for.
        what: String,
    },
    /// A kernel or the hardware failed in a way that leaves the process without this GPU (CUDA Driver API, `CUresult`:
    /// "the process must be terminated and relaunched").
    #[error(
        "the GPU context is unusable since {cause} (told by {call}); restart the process to use this GPU again"
    )]
    Poisoned {
        /// The call that told it first.
        call: &'static str,
        /// The driver's error name and text.
        cause: String,
    },
    /// A driver call failed.
    #[error("{call} failed: {message}")]
    Call {
        /// The driver's function.
        call: &'static str,
        /// Its error name and text.
        message: String,
    },
    /// The driver's compiler refused the module.
    #[error("the driver's compiler refused the module for {target}: {log}")]
    Compile {
        /// The module's target.
        target: String,
        /// The compiler's log.
        log: String,
    },
    /// What the compiler made of a kernel is not what the plan said.
    #[error("{entry} is not admitted: invalid value '{found}' for {what}: expected at most {accepted}")]
    Admission {
        /// The entry.
        entry: String,
        /// The resource.
        what: &'static str,
        /// What was found.
        found: u64,
        /// What would be accepted.
        accepted: u64,
    },
    /// The launch contract and the caller's buffers do not fit.
    #[error("launch of {entry}: {reason}")]
    Contract {
        /// The entry.
        entry: String,
        /// What does not fit.
        reason: String,
    },
    /// A copy longer than the buffer.
    #[error("copy of {bytes} bytes does not fit a buffer of {room} bytes")]
    Copy {
        /// Bytes asked for.
        bytes: usize,
        /// The buffer's size.
        room: usize,
    },
    /// Two things that live in different contexts were used together.
    #[error("{what} belongs to device {found}, the call is for device {expected}")]
    OtherDevice {
        /// The argument.
        what: &'static str,
        /// Its device.
        found: i32,
        /// The device of the call.
        expected: i32,
    },
    /// A tensor map that the hardware does not take.
    #[error(transparent)]
    TensorMap(ptx::TensorMapError),
}

/// How the cause begins where a kernel was given up.
pub(crate) const NEVER_ENDS: &str = "a kernel did not end";

impl DriverError {
    /// Whether a kernel was given up because it did not end in time.
    pub fn is_hang(&self) -> bool {
        matches!(self, DriverError::Poisoned { cause, .. } if cause.starts_with(NEVER_ENDS))
    }
}

/// A CUDA version as the driver writes it: 12040 is 12.4.
struct Version(i32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
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
