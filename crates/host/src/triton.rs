//! Compiles Triton kernels with Triton's own compiler, in a Python process. It needs no GPU.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::store::Scratch;
use crate::tools::python;

/// Why a Triton kernel could not be compiled.
#[derive(Debug, thiserror::Error)]
pub enum TritonError {
    /// The Python that was found has no Triton.
    #[error(
        "a Triton kernel needs Triton, but `{python}` does not have it ({reason}): install it with `pip \
        install triton` (no GPU is \
         needed), and set FLASHCORE_PYTHON to that Python"
    )]
    Missing { python: String, reason: String },
    /// Python does not start, or its output cannot be parsed.
    #[error("Triton runs in `{python}`, which fails: {reason}; set FLASHCORE_PYTHON to a working Python 3")]
    Python { python: String, reason: String },
    /// Triton rejects the kernel.
    #[error("Triton does not compile {function} of {file}:\n{said}")]
    Refused { file: PathBuf, function: String, said: String },
}

/// The version of Triton in [`python`]'s packages. Triton itself is not imported, which takes seconds.
///
/// # Errors
/// When Python does not start, or has no Triton.
pub fn version() -> Result<String, TritonError> {
    let python = python();
    let script = "import importlib.metadata as m; print(m.version('triton'))";
    let output = Command::new(&python).args(["-c", script]).output();
    let output =
        output.map_err(|error| TritonError::Python { python: python.clone(), reason: error.to_string() })?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
        false => {
            let said = String::from_utf8_lossy(&output.stderr);
            let reason = said.trim_end().lines().last().unwrap_or_default().to_owned();
            Err(TritonError::Missing { python, reason })
        }
    }
}

/// A parameter of a Triton function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    pub name: String,
    /// Whether the function loads from it or stores to it, and so takes a pointer.
    pub read: bool,
    pub written: bool,
    /// Whether it is `tl.constexpr`.
    pub constant: bool,
    /// The default value as the source has it.
    pub default: Option<String>,
}

/// The launch of a Triton function, as far as its source determines it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TritonSignature {
    pub parameters: Vec<Parameter>,
    /// The axes of the grid along which the function reads the program's number.
    pub axes: Vec<u64>,
}

/// The signature of a Triton function, by its source alone: Triton is not needed.
///
/// # Errors
/// When Python does not start, or the file has no such function.
pub fn signature(file: &Path, function: &str) -> Result<TritonSignature, TritonError> {
    let python = python();
    let output = Command::new(&python)
        .args(["-c", include_str!("triton_parameters.py")])
        .arg(file)
        .arg(function)
        .output()
        .map_err(|error| TritonError::Python { python: python.clone(), reason: error.to_string() })?;
    let refused =
        |said: String| TritonError::Refused { file: file.to_path_buf(), function: function.to_owned(), said };
    if !output.status.success() {
        return Err(refused(last_lines(&String::from_utf8_lossy(&output.stderr))));
    }
    let found: serde_json::Value =
        serde_json::from_slice(&output.stdout).map_err(|error| refused(error.to_string()))?;
    let parameter = |row: &serde_json::Value| {
        let is = |key: &str| row[key].as_bool().unwrap_or_default();
        Parameter {
            name: row["name"].as_str().unwrap_or_default().to_owned(),
            read: is("read"),
            written: is("written"),
            constant: is("constant"),
            default: row["default"].as_str().map(str::to_owned),
        }
    };
    let parameters = found["parameters"].as_array().into_iter().flatten().map(parameter).collect();
    let axes = found["axes"].as_array().into_iter().flatten().filter_map(serde_json::Value::as_u64).collect();
    Ok(TritonSignature { parameters, axes })
}

/// A kernel to compile.
#[derive(Clone, Debug)]
pub struct Request {
    pub file: PathBuf,
    pub function: String,
    /// The type of each parameter that is not a constant, such as `*fp16:16` or `i32`.
    pub types: Vec<String>,
    /// Names and values of the parameters that are constants.
    pub constants: Vec<(String, String)>,
    pub warps: Option<u32>,
    pub stages: Option<u32>,
    /// Compute capability, such as 80.
    pub sm: u32,
}

/// A compiled kernel.
#[derive(Clone, Debug)]
pub struct Compiled {
    pub ptx: String,
    pub entry: String,
    /// Dynamic shared memory in bytes.
    pub shared: u32,
    /// Threads per CTA.
    pub threads: u32,
}

/// Time limit of a compilation.
const LIMIT: Duration = Duration::from_secs(300);

impl Request {
    /// Compiles the kernel.
    ///
    /// # Errors
    /// When Triton is not installed or rejects the kernel.
    pub fn compile(&self) -> Result<Compiled, TritonError> {
        let python = python();
        let fail = |reason: String| TritonError::Python { python: python.clone(), reason };
        let scratch = Scratch::new().map_err(|error| fail(error.to_string()))?;
        let (driver, answer) = (scratch.path("compile.py"), scratch.path("answer.json"));
        std::fs::write(&driver, include_bytes!("triton_compile.py"))
            .map_err(|error| fail(error.to_string()))?;
        let request = serde_json::json!({
            "file": self.file,
            "function": self.function,
            "types": self.types,
            "constants": self.constants,
            "options": { "num_warps": self.warps, "num_stages": self.stages },
            "sm": self.sm,
        });
        let mut command = Command::new(&python);
        command.arg(&driver).arg(request.to_string()).arg(&answer);
        let ended = crate::child::within(&mut command, LIMIT).map_err(|error| fail(error.to_string()))?;
        let Some((status, said)) = ended else {
            return Err(fail(format!("it did not end within {} s", LIMIT.as_secs())));
        };
        match status.code() {
            Some(0) => {}
            Some(3) => return Err(TritonError::Missing { python, reason: said.trim().to_owned() }),
            _ => {
                let (file, function) = (self.file.clone(), self.function.clone());
                return Err(TritonError::Refused { file, function, said: last_lines(&said) });
            }
        }
        let text = std::fs::read_to_string(&answer).map_err(|error| fail(error.to_string()))?;
        let answer: serde_json::Value =
            serde_json::from_str(&text).map_err(|error| fail(error.to_string()))?;
        let word = |key: &str| answer[key].as_str().map(str::to_owned);
        let number = |key: &str| answer[key].as_u64().and_then(|n| u32::try_from(n).ok());
        let compiled = || {
            Some(Compiled {
                ptx: word("ptx")?,
                entry: word("entry")?,
                shared: number("shared")?,
                threads: number("threads")?,
            })
        };
        compiled().ok_or_else(|| fail("its answer lacks a part".to_owned()))
    }
}

/// The last lines of a process's output, which contain the exception of a traceback.
fn last_lines(said: &str) -> String {
    let lines: Vec<&str> = said.trim_end().lines().collect();
    lines[lines.len().saturating_sub(8)..].join("\n")
}
