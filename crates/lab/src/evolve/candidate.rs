//! What evolution varies: plans of our kernels, and whole kernels of others.

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::provenance::hash;

/// Something that can be run to compute a problem.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Candidate {
    /// A plan of the GPU kernels.
    Gpu(kernels::Plan),
    /// A plan of the native CPU kernels.
    Cpu(cpu::CpuPlan),
    /// A whole kernel for a GPU.
    Kernel(Source),
}

/// A kernel as text, with the launch file that `check` takes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Source {
    /// What it is written in.
    pub language: Language,
    /// The kernel.
    pub text: String,
    /// The launch file (TOML).
    pub launch: String,
}

/// Longest text of a kernel, bytes: ten times that of our longest.
const LONGEST_TEXT: usize = 8 << 20;
/// Longest launch file.
const LONGEST_LAUNCH: usize = 64 << 10;

/// A kernel of which nobody wants to read the end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its {what} has {length} bytes; accepted: at most {most}")]
pub struct TooLong {
    what: &'static str,
    length: usize,
    most: usize,
}

impl Source {
    /// Whether it is worth keeping.
    ///
    /// # Errors
    /// What is too long.
    pub fn check_lengths(&self) -> Result<(), TooLong> {
        let text = ("text", self.text.len(), LONGEST_TEXT);
        let launch = ("launch file", self.launch.len(), LONGEST_LAUNCH);
        match [text, launch].into_iter().find(|(_, length, most)| length > most) {
            Some((what, length, most)) => Err(TooLong { what, length, most }),
            None => Ok(()),
        }
    }
}

/// What kernels are written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Language {
    /// PTX.
    Ptx,
    /// CUDA C++, through NVRTC.
    Cuda,
}

impl Language {
    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            Language::Ptx => "PTX",
            Language::Cuda => "CUDA C++",
        }
    }
}

impl Candidate {
    /// The same for equal candidates alone: 12 hexadecimal digits.
    pub fn hash(&self) -> String {
        hash(json!(self).to_string().as_bytes())
    }
}
