//! References: the expected outputs of any kernel, from a built-in operation, another kernel, a file or a
//! Python function.
//!
//! A launch file states a reference (`[reference]`), [`ReferenceSpec`] is its validated form, and
//! [`Reference`] is bound to the buffers of a launch. [`Reference::expect`] computes the expected elements,
//! each with a tolerance.

mod builtin;
mod judge;
mod parse;
mod python;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use emu::{Buffer, Options};
use ptx::Kernel;

pub use builtin::{Builtin, Operation};
pub use judge::{Expected, Judgement};
pub use parse::ReferenceSpec;

use crate::launchfile::{BufferType, LaunchStep, Memory};
use crate::numbers::Number;

/// Why a reference could not compute its outputs.
#[derive(Debug, thiserror::Error)]
pub enum ReferenceError {
    /// The reference kernel is itself wrong or does not run.
    #[error("the reference kernel {kernel} failed: {reason}")]
    Kernel { kernel: String, reason: String },
    /// Python does not start, or the function failed, ran too long or returned something else.
    #[error("the Python reference {function}: {reason}")]
    Python { function: String, reason: String },
}

/// The source of the expected output.
#[derive(Clone, Debug, PartialEq)]
pub enum ReferenceSource {
    Builtin(Builtin),
    /// Another kernel, from a `.ptx` or `.cu` file, or an earlier version of the kernel.
    Kernel {
        path: String,
        launch: Box<LaunchStep>,
    },
    /// The file with this number in the launch file's list.
    File {
        path: String,
        file: usize,
    },
    Python {
        path: String,
        function: String,
        timeout: Duration,
    },
}

impl ReferenceSource {
    /// The source in words, for the line of the verdict.
    pub fn words(&self) -> String {
        match self {
            ReferenceSource::Builtin(builtin) => format!("the built-in {}", builtin.name()),
            ReferenceSource::Kernel { path, .. } => format!("the kernel in {path}"),
            ReferenceSource::File { path, .. } => format!("the file {path}"),
            ReferenceSource::Python { path, function, .. } => {
                format!("the Python function {path}:{function}")
            }
        }
    }
}

/// The tolerance that a launch file states. Fields that it leaves out follow from the element types.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tolerance {
    pub atol: Option<f64>,
    pub rtol: Option<f64>,
}

/// A reference that is bound to the buffers of a launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Reference {
    /// The name of the judged argument.
    pub name: String,
    /// The number of its buffer.
    pub output: usize,
    /// Its element type and shape.
    pub memory: Memory,
    /// The buffers and numbers that the source reads, in its order.
    pub inputs: Vec<ReferenceInput>,
    pub source: ReferenceSource,
    pub tolerance: Tolerance,
    /// The reference kernel, on the same buffers.
    pub kernel: Option<Arc<Kernel>>,
    /// The elements of the reference file, in the order of the output's shape.
    pub elements: Option<Arc<[u8]>>,
    /// The folder that a relative path of the source refers to.
    pub folder: PathBuf,
}

/// An input of a reference.
#[derive(Clone, Debug, PartialEq)]
pub enum ReferenceInput {
    Buffer { index: usize, memory: Memory },
    Number(f64),
}

impl Reference {
    /// The expected output for the buffers' contents before the launch. `fresh` creates the buffers again,
    /// for a reference kernel.
    ///
    /// # Errors
    /// When the reference kernel or the Python function fails.
    pub fn expect(
        &self,
        before: &[Vec<u8>],
        fresh: impl Fn() -> Vec<Buffer>,
        options: &Options,
    ) -> Result<Expected, ReferenceError> {
        let (dtype, view) = (self.memory.dtype, self.memory.shaped());
        let decode = |bytes: &[u8]| -> Vec<Number> {
            let size = dtype.bytes();
            bytes.chunks_exact(size).map(|element| Number::of(dtype, element)).collect()
        };
        let missing = Number::Real(f64::NAN);
        match &self.source {
            ReferenceSource::Builtin(builtin) => {
                let inputs: Vec<_> = self.inputs.iter().filter_map(|input| input.read(before)).collect();
                let elements = builtin.compute(&inputs, &view);
                let integers = dtype.unit_roundoff() == 0.0 && inputs.iter().all(|x| x.roundoff == 0.0);
                let is_double = dtype == BufferType::F64 || self.inputs.iter().any(ReferenceInput::is_double);
                let accumulator = match (integers, is_double) {
                    (true, _) => 0.0,
                    (false, true) => BufferType::F64.unit_roundoff(),
                    (false, false) => BufferType::F32.unit_roundoff(),
                };
                Ok(Expected::of_magnitudes(dtype, &elements, accumulator, self.tolerance))
            }
            ReferenceSource::File { .. } => {
                let elements = self.elements.as_deref().unwrap_or_default();
                Ok(Expected::of_values(dtype, decode(elements), self.tolerance))
            }
            ReferenceSource::Python { path, function, timeout } => {
                let inputs: Vec<_> = self.inputs.iter().map(|input| input.array(before)).collect();
                let call = python::Call { file: &self.folder.join(path), function, limit: *timeout };
                let values = call.run(&inputs, view.shape())?;
                Ok(Expected::of_values(dtype, values, self.tolerance))
            }
            ReferenceSource::Kernel { path, launch } => {
                let options = Options { cooperative: launch.cooperative, ..options.clone() };
                let after = self.run_kernel(path, fresh(), &options)?;
                let all = decode(&after);
                let values = view.places().map(|at| all.get(at).copied().unwrap_or(missing)).collect();
                Ok(Expected::of_values(dtype, values, self.tolerance))
            }
        }
    }

    /// The output's bytes after the reference kernel.
    fn run_kernel(
        &self,
        path: &str,
        mut buffers: Vec<Buffer>,
        options: &Options,
    ) -> Result<Vec<u8>, ReferenceError> {
        let fail = |reason: String| ReferenceError::Kernel { kernel: path.to_owned(), reason };
        let kernel = self.kernel.as_ref().ok_or_else(|| fail("it was not read".to_owned()))?;
        let options = Options {
            traced_ctas: Vec::new(),
            only: None,
            survey: false,
            must_write: Default::default(),
            ..options.clone()
        };
        let report = emu::run(kernel, &mut buffers.iter_mut().collect::<Vec<_>>(), &options)
            .map_err(|error| fail(error.to_string()))?;
        if let Some(hazard) = report.hazards.iter().find(|hazard| hazard.fails()) {
            return Err(fail(hazard.to_string()));
        }
        let output = &buffers[self.output];
        if let Some((_, missing)) = output.missing(0..output.len()).filter(|_| self.memory.view.is_none()) {
            return Err(fail(format!("it left {missing} bytes of {} unwritten", self.name)));
        }
        Ok(output.to_bytes())
    }

    /// Compares the output's bytes after the launch with the expected elements. Elements for which `judged`
    /// is false are left out.
    pub fn judge(&self, expected: &Expected, after: &[u8], judged: impl Fn(usize) -> bool) -> Judgement {
        let (dtype, view) = (self.memory.dtype, self.memory.shaped());
        let size = dtype.bytes();
        let missing = Number::Real(f64::NAN);
        let element = |at: usize| after.get(at * size..).map_or(missing, |b| Number::of(dtype, b));
        let found = view.places().map(|at| judged(at).then(|| element(at)));
        expected.judge(&self.name, &self.source.words(), found, view.shape())
    }
}

impl ReferenceInput {
    fn is_double(&self) -> bool {
        matches!(self, ReferenceInput::Buffer { memory: Memory { dtype: BufferType::F64, .. }, .. })
    }

    /// The elements in the order of the shape; `None` for a number.
    fn read(&self, before: &[Vec<u8>]) -> Option<builtin::InputTensor> {
        let ReferenceInput::Buffer { index, memory } = self else { return None };
        let (bytes, size, view) = (&before[*index], memory.dtype.bytes(), memory.shaped());
        let values = view.places().map(|at| memory.dtype.decode(&bytes[at * size..])).collect();
        Some(builtin::InputTensor {
            shape: view.shape().to_vec(),
            values,
            roundoff: memory.dtype.unit_roundoff(),
        })
    }

    /// The operand in the form that Python receives.
    fn array(&self, before: &[Vec<u8>]) -> python::Argument {
        match self {
            ReferenceInput::Number(value) => python::Argument::Number(*value),
            ReferenceInput::Buffer { index, memory } => {
                let (bytes, size, view) = (&before[*index], memory.dtype.bytes(), memory.shaped());
                let dense = view.places().flat_map(|at| bytes[at * size..][..size].iter().copied());
                python::Argument::Array {
                    dtype: memory.dtype,
                    shape: view.shape().to_vec(),
                    bytes: dense.collect(),
                }
            }
        }
    }
}
