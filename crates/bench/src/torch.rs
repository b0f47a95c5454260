//! PyTorch's CPU attention as a peer. It runs in a child process that answers each JSON line with one, so
//! that its runs interleave with those of the native kernels. The child times itself, so that the times do
//! not include the pipe.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use problem::{Band, Operand, Problem, Tensor};
use serde::Deserialize;
use serde_json::json;

use host::store::Scratch;
use host::tools::python;
use judge::values::{Inputs, Values};

/// Why PyTorch cannot race.
#[derive(Debug, thiserror::Error)]
pub enum TorchError {
    /// The Python interpreter does not start.
    #[error("cannot start `{python}`: {source}; install Python 3 or name one in FLASHCORE_PYTHON")]
    Start { python: String, source: std::io::Error },
    /// The interpreter has no torch module.
    #[error("{0}; install it (`pip install torch`) to race against it")]
    Missing(String),
    #[error("PyTorch: {0}")]
    Refused(String),
    /// The child ended or sent something other than an answer.
    #[error("the python3 child process ended without an answer: {0}")]
    Broken(String),
    #[error("{0}")]
    Store(#[from] host::store::StoreError),
}

/// A running PyTorch process.
pub struct Torch {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    scratch: Scratch,
    /// PyTorch's version.
    pub version: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Answer {
    error: Option<String>,
    version: Option<String>,
    us: Option<f64>,
}

/// Makes idle OpenMP threads sleep at once. By default they spin for up to 200 ms on a core that the next
/// contestant needs.
const SLEEP: [(&str, &str); 3] =
    [("OMP_WAIT_POLICY", "PASSIVE"), ("KMP_BLOCKTIME", "0"), ("GOMP_SPINCOUNT", "0")];

impl Torch {
    /// Starts python3 and imports torch.
    ///
    /// # Errors
    /// When there is no python3 or no torch.
    pub fn start() -> Result<Torch, TorchError> {
        let python = python();
        let mut child = Command::new(&python)
            .args(["-c", include_str!("sdpa.py")])
            .envs(SLEEP)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|source| TorchError::Start { python, source })?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (input, output) = pipes.ok_or_else(|| TorchError::Broken("it has no pipes".into()))?;
        let (output, version) = (BufReader::new(output), String::new());
        let mut torch = Torch { child, input, output, scratch: Scratch::new()?, version };
        let answer = torch.answer().map_err(|error| match error {
            TorchError::Refused(why) => TorchError::Missing(why),
            other => other,
        });
        torch.version = answer?.version.unwrap_or_default();
        Ok(torch)
    }

    /// Sends a dense problem and its inputs to the child.
    ///
    /// # Errors
    /// When the child rejects the problem, or the problem has a softcap or asks for the LSE, which PyTorch's
    /// function lacks.
    pub fn set_up(&mut self, problem: &Problem, inputs: &Inputs, threads: usize) -> Result<(), TorchError> {
        if problem.score.softcap.is_some() {
            return Err(TorchError::Refused("scaled_dot_product_attention has no softcap".to_owned()));
        }
        if problem.pass.lse() {
            return Err(TorchError::Refused("scaled_dot_product_attention returns no LSE".to_owned()));
        }
        let file = |name: &str, values: &Values| -> Result<PathBuf, TorchError> {
            let path = self.scratch.path(name);
            std::fs::write(&path, values.to_bytes())
                .map_err(|source| host::store::StoreError::Write { path: path.clone(), source })?;
            Ok(path)
        };
        let file = |operand: Operand| file(operand.name(), &inputs[operand]);
        let (q, k, v) = (file(Operand::Q)?, file(Operand::K)?, file(Operand::V)?);
        self.ask(&json!({
            "op": "setup", "threads": threads, "dtype": problem.dtypes.to_string(),
            "q": q, "k": k, "v": v,
            "shape_q": problem.extents(Tensor::Q), "shape_k": problem.extents(Tensor::K),
            "shape_v": problem.extents(Tensor::V),
            "diagonals": diagonals(problem), "scale": problem.softmax_scale(),
        }))?;
        Ok(())
    }

    /// The time of one run, µs.
    ///
    /// # Errors
    /// When the child does not answer.
    pub fn run(&mut self) -> Result<f64, TorchError> {
        self.time(&json!({ "op": "run" }))
    }

    /// Drops the output of the last run, so that [`Torch::output`] can only return the output of a later run.
    ///
    /// # Errors
    /// When the child does not answer.
    pub fn forget(&mut self) -> Result<(), TorchError> {
        self.ask(&json!({ "op": "forget" })).map(|_| ())
    }

    /// The output of the last run, as the bytes of a dense `[batch, head, sequence, dim]` tensor. After
    /// [`Torch::forget`] there is none until the next run.
    ///
    /// # Errors
    /// When the child does not answer.
    pub fn output(&mut self) -> Result<Vec<u8>, TorchError> {
        let path = self.scratch.path("out");
        self.ask(&json!({ "op": "save", "path": path }))?;
        read(&path)
    }

    /// Rate of a square f32 matrix product of size `n`, GFLOP/s: the best of five.
    ///
    /// # Errors
    /// When the child does not answer.
    pub fn sgemm_gflops(&mut self, n: usize) -> Result<f64, TorchError> {
        let us = self.time(&json!({ "op": "sgemm", "n": n, "repeats": 5 }))?;
        Ok(2.0 * (n as f64).powi(3) / us * 1e-3)
    }

    fn time(&mut self, command: &serde_json::Value) -> Result<f64, TorchError> {
        self.ask(command)?.us.ok_or_else(|| TorchError::Broken("an answer without a time".into()))
    }

    fn ask(&mut self, command: &serde_json::Value) -> Result<Answer, TorchError> {
        writeln!(self.input, "{command}").map_err(|e| TorchError::Broken(e.to_string()))?;
        self.answer()
    }

    fn answer(&mut self) -> Result<Answer, TorchError> {
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(|e| TorchError::Broken(e.to_string()))?;
        let answer: Answer = serde_json::from_str(&line).map_err(|e| TorchError::Broken(e.to_string()))?;
        match answer.error {
            Some(error) => Err(TorchError::Refused(error)),
            None => Ok(answer),
        }
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        // The child may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The first and the last key that query 0 sees; each later query sees one key further. Either may be
/// negative; `None` means no bound.
fn diagonals(problem: &Problem) -> [Option<i64>; 2] {
    let level = problem.band.shift(problem.seq_q, problem.seq_kv);
    let Band { before, after, .. } = problem.band;
    [before.map(|keys| level - i64::from(keys)), after.map(|keys| level + i64::from(keys))]
}

fn read(path: &Path) -> Result<Vec<u8>, TorchError> {
    std::fs::read(path)
        .map_err(|source| host::store::StoreError::Read { path: path.to_path_buf(), source }.into())
}
