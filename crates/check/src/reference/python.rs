//! A Python function as a reference. It runs in a child process with a time limit; arrays are passed as
//! `.npy` files. Types that NumPy lacks (bf16, fp8) are passed as float32.

use std::path::Path;
use std::time::Duration;

use host::store::Scratch;

use super::ReferenceError;
use crate::launchfile::BufferType;
use crate::numbers::{Number, Numbers};

/// An argument of the function.
pub(super) enum Argument {
    Number(f64),
    /// Dense elements.
    Array {
        dtype: BufferType,
        shape: Vec<usize>,
        bytes: Vec<u8>,
    },
}

/// A function of a file.
pub(super) struct Call<'a> {
    pub file: &'a Path,
    pub function: &'a str,
    pub limit: Duration,
}

impl Call<'_> {
    /// Calls the function. The result has `shape`, or is flat with that number of elements.
    ///
    /// # Errors
    /// When Python or NumPy is missing, the function raises an exception or exceeds the time limit, or the
    /// result has another shape.
    pub fn run(&self, arguments: &[Argument], shape: &[usize]) -> Result<Vec<Number>, ReferenceError> {
        let fail = |reason: String| ReferenceError::Python {
            function: format!("{}:{}", self.file.display(), self.function),
            reason,
        };
        let scratch = Scratch::new().map_err(|error| fail(error.to_string()))?;
        let write = |name: &str, bytes: &[u8]| {
            let path = scratch.path(name);
            std::fs::write(&path, bytes).map(|()| path).map_err(|error| fail(error.to_string()))
        };
        let driver = write("call.py", include_bytes!("call.py"))?;
        let mut words = Vec::new();
        for (at, argument) in arguments.iter().enumerate() {
            words.push(match argument {
                Argument::Number(value) if value.fract() == 0.0 && value.abs() < 9e15 => {
                    format!("{}", *value as i64)
                }
                Argument::Number(value) => format!("float('{value}')"),
                Argument::Array { dtype, shape, bytes } => {
                    write(&format!("{at}.npy"), &Numbers::of(*dtype, shape, bytes).to_npy())?;
                    format!("@{at}.npy")
                }
            });
        }
        let answer = scratch.path("answer.npy");
        let python = host::tools::python();
        let mut command = std::process::Command::new(&python);
        command.arg(driver).arg(self.file).arg(self.function).arg(scratch.path("")).args(words);
        let ended = host::child::within(&mut command, self.limit);
        match ended
            .map_err(|error| fail(format!("`{python}` does not start: {error}; set FLASHCORE_PYTHON")))?
        {
            None => {
                Err(fail(format!("it did not end within {} s; raise `timeout`", self.limit.as_secs_f64())))
            }
            Some((status, said)) if !status.success() => Err(fail(last_lines(&said))),
            Some(_) => {
                let found = Numbers::load(&answer).map_err(|error| fail(error.to_string()))?;
                let elements: usize = shape.iter().product();
                if found.shape != shape && found.shape.iter().product::<usize>() != elements {
                    let (given, wanted) = (&found.shape, shape);
                    return Err(fail(format!(
                        "it returned an array of shape {given:?}, expected {wanted:?}"
                    )));
                }
                Ok(found.elements())
            }
        }
    }
}

/// The last lines of a process's output, which contain the exception of a traceback.
fn last_lines(said: &str) -> String {
    let lines: Vec<&str> = said.trim_end().lines().collect();
    match &lines[lines.len().saturating_sub(6)..] {
        [] => "the process failed and said nothing".to_owned(),
        tail => tail.join("\n"),
    }
}
