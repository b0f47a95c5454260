//! Arguments of the command `capture`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use super::positive;

#[derive(Debug, Args)]
pub struct Capture {
    /// Part of the name of the kernels whose launches are recorded, as in their module (of C++, mangled).
    /// Without it the kernels are listed, with the numbers of their launches
    #[arg(long, value_name = "NAME")]
    pub kernel: Option<String>,
    /// Numbers of the launches of each kernel, from 1
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', default_value = "1", value_parser = positive::<u64>, requires = "kernel")]
    pub at: Vec<u64>,
    /// Folder for the launches: a folder each, with the PTX, the launch file and the memory
    #[arg(long, value_name = "FOLDER", default_value = "captured")]
    pub out: PathBuf,
    /// Maximum memory of a launch in bytes; a launch with more is not recorded
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30, value_parser = positive::<usize>)]
    pub limit: usize,
    /// Also record the memory after the launch: `check` then compares its results with those of the GPU
    #[arg(long, requires = "kernel")]
    pub after: bool,
    /// Leave PyTorch's caching allocator on, as CUDA graphs need: memory then ends at the end of a block of
    /// the allocator, and `check` does not see an access between the end of a tensor and the end of its block
    #[arg(long)]
    pub cached: bool,
    /// PTX of kernels whose modules are machine code: a .ptx file, or a folder with .ptx files. Triton's and
    /// Inductor's caches are searched without this option
    #[arg(long, value_name = "PATH")]
    pub ptx: Vec<PathBuf>,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
    #[arg(from_global)]
    pub json: bool,
}
