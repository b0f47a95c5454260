/// What can go wrong between us and the GPU.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DriverError {
    /// The driver library is not there.
    #[error("no CUDA driver on this machine (libcuda is not found); install the NVIDIA driver to use a GPU")]
    NoDriver,
    /// The driver sees no such device.
    #[error("device {ordinal} does not exist; the driver sees {count} device(s)")]
    NoDevice {
        /// What was asked for.
        ordinal: i32,
        /// How many there are.
        count: i32,
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
}

impl DriverError {
    pub(crate) fn call(call: &'static str) -> impl FnOnce(cudarc::driver::DriverError) -> DriverError {
        move |error| DriverError::Call { call, message: error.to_string() }
    }
}
