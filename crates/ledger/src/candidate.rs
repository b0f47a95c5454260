//! Candidates of an evolution: plans of FlashCore's kernels, and whole kernels from other sources.

use serde::{Deserialize, Serialize};
use serde_json::json;

use bench::provenance::hash;

/// A plan or a kernel that computes a problem.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Candidate {
    Gpu(kernels::Plan),
    Cpu(cpu::CpuPlan),
    Kernel(KernelText),
}

/// The text of a kernel with the launch file that `check` reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KernelText {
    pub language: Language,
    pub text: String,
    /// The launch file (TOML).
    pub launch: String,
}

/// Maximum length of a kernel's text in bytes, ten times FlashCore's longest kernel.
const LONGEST_TEXT: usize = 8 << 20;
/// Maximum length of a launch file, bytes.
const LONGEST_LAUNCH: usize = 64 << 10;

/// Source text over the size limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid value '{length}' for the length of the {what} in bytes: expected at most {most}")]
pub struct TooLong {
    what: &'static str,
    length: usize,
    most: usize,
}

impl KernelText {
    /// Checks the lengths of the text and the launch file.
    ///
    /// # Errors
    /// When the text or the launch file is too long.
    pub fn check_lengths(&self) -> Result<(), TooLong> {
        let text = ("text", self.text.len(), LONGEST_TEXT);
        let launch = ("launch file", self.launch.len(), LONGEST_LAUNCH);
        match [text, launch].into_iter().find(|(_, length, most)| length > most) {
            Some((what, length, most)) => Err(TooLong { what, length, most }),
            None => Ok(()),
        }
    }
}

/// The language of a kernel's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Language {
    Ptx,
    /// CUDA C++, compiled by NVRTC.
    Cuda,
}

impl Language {
    /// The name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Language::Ptx => "PTX",
            Language::Cuda => "CUDA C++",
        }
    }
}

impl Candidate {
    /// A hash of 12 hexadecimal digits that identifies equal candidates.
    pub fn hash(&self) -> String {
        hash(json!(self).to_string().as_bytes())
    }
}
