//! Errors as Python classes: those of `flashcore_attn._errors`. Each class is also a subclass of the builtin
//! exception that a Python programmer would catch.

use cpu::CpuError;
use driver::DriverError;
#[cfg(feature = "evolve")]
use evolve::EvolveError;
#[cfg(feature = "evolve")]
use evolve::setup::SetupError;
use flashcore::AttentionError;
use kernels::KernelError;
#[cfg(feature = "evolve")]
use ledger::LedgerError;
use problem::ProblemError;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// Why a call was rejected or failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A value that no implementation could accept (`ArgumentError`, a `ValueError`).
    #[error("{0}")]
    Argument(String),
    /// An element type other than f16, bf16 and f32 (`DTypeError`, a `TypeError`).
    #[error("{0}")]
    DType(String),
    /// A feature that FlashCore does not have yet (`UnsupportedError`, a `NotImplementedError`).
    #[error("{0}")]
    Unsupported(String),
    /// An error of the GPU or its driver (`DeviceError`, a `RuntimeError`).
    #[error("{0}")]
    Device(String),
    /// The GPU has no memory left (`DeviceMemoryError`, also a `MemoryError`).
    #[error("{0}")]
    DeviceMemory(String),
    /// The ledger cannot be read or written (`LedgerError`, an `OSError`).
    #[cfg(feature = "evolve")]
    #[error("{0}")]
    Ledger(String),
    /// An exception that Python raised.
    #[error(transparent)]
    Python(#[from] PyErr),
}

impl Error {
    /// The error for a value that an argument cannot have.
    pub fn invalid(argument: &str, value: &str, expected: &str) -> Error {
        Error::Argument(format!("invalid value '{value}' for {argument}: expected {expected}"))
    }

    fn class(&self) -> &'static str {
        match self {
            Error::Argument(_) => "ArgumentError",
            Error::DType(_) => "DTypeError",
            Error::Unsupported(_) => "UnsupportedError",
            Error::Device(_) => "DeviceError",
            Error::DeviceMemory(_) => "DeviceMemoryError",
            #[cfg(feature = "evolve")]
            Error::Ledger(_) => "LedgerError",
            Error::Python(_) => "FlashCoreError",
        }
    }
}

impl From<ProblemError> for Error {
    fn from(error: ProblemError) -> Error {
        match error {
            ProblemError::UnknownName { what: "dtype", .. } | ProblemError::DTypes { .. } => {
                Error::DType(error.to_string())
            }
            error => Error::Argument(error.to_string()),
        }
    }
}

impl From<CpuError> for Error {
    fn from(error: CpuError) -> Error {
        Error::Argument(error.to_string())
    }
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Error {
        match error {
            DriverError::OutOfMemory { .. } => Error::DeviceMemory(error.to_string()),
            error => Error::Device(error.to_string()),
        }
    }
}

impl From<KernelError> for Error {
    fn from(error: KernelError) -> Error {
        Error::from(AttentionError::Kernel(error))
    }
}

#[cfg(feature = "evolve")]
impl From<LedgerError> for Error {
    fn from(error: LedgerError) -> Error {
        match error {
            LedgerError::Unknown { .. } | LedgerError::Value { .. } => Error::Argument(error.to_string()),
            error => Error::Ledger(error.to_string()),
        }
    }
}

#[cfg(feature = "evolve")]
impl From<EvolveError> for Error {
    fn from(error: EvolveError) -> Error {
        match error {
            EvolveError::Ledger(error) => error.into(),
            error => Error::Argument(error.to_string()),
        }
    }
}

#[cfg(feature = "evolve")]
impl From<SetupError> for Error {
    fn from(error: SetupError) -> Error {
        match error {
            SetupError::Kernel(error) => error.into(),
            SetupError::Ledger(error) => error.into(),
            error
            @ (SetupError::Argument { .. } | SetupError::Memory { .. } | SetupError::Changed { .. }) => {
                Error::Argument(error.to_string())
            }
        }
    }
}

impl From<AttentionError> for Error {
    fn from(error: AttentionError) -> Error {
        match error {
            AttentionError::Problem(error) | AttentionError::Kernel(KernelError::Problem(error)) => {
                error.into()
            }
            AttentionError::Driver(error) => error.into(),
            AttentionError::Kernel(_) | AttentionError::Unsupported { .. } => {
                Error::Unsupported(error.to_string())
            }
            error => Error::Argument(error.to_string()),
        }
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> PyErr {
        if let Error::Python(error) = error {
            return error;
        }
        let (class, message) = (error.class(), error.to_string());
        Python::attach(|py| {
            let class = py.import("flashcore_attn._errors").and_then(|module| module.getattr(class));
            match class.and_then(|class| class.call1((&message,))) {
                Ok(instance) => PyErr::from_value(instance),
                Err(_) => PyRuntimeError::new_err(message), // the package is being torn down
            }
        })
    }
}
