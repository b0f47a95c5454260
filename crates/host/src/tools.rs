//! Finds Python, and NVIDIA's NVRTC, which compiles CUDA C++. (For ptxas see `predict::resources::Ptxas`.)

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Why CUDA C++ could not be compiled.
#[derive(Debug, thiserror::Error)]
pub enum NvrtcError {
    #[error(
        "CUDA C++ needs NVRTC, which was not found: set FLASHCORE_NVRTC to libnvrtc.so, or fetch it with \
         `cargo xtask tools`; or compile to PTX elsewhere and check that"
    )]
    NotFound,
    /// NVRTC is loaded by a python3 process, and that process does not start.
    #[error("NVRTC is loaded through `{python}`, which does not start: {source}; set FLASHCORE_PYTHON")]
    Python { python: String, source: std::io::Error },
    #[error("{library} cannot be loaded: {reason}")]
    Load { library: PathBuf, reason: String },
    /// The source includes CUDA headers that are not installed.
    #[error(
        "the source includes <{header}>, and there are no CUDA headers beside NVRTC: fetch them with `cargo xtask tools`, or \
         set FLASHCORE_CUDA_INCLUDE to the folder that holds {header}"
    )]
    NoHeaders { header: String },
    /// NVRTC rejects the source.
    #[error("NVRTC refuses the source:\n{0}")]
    Source(String),
}

/// The interpreter: `FLASHCORE_PYTHON`, else `python3` on PATH.
pub fn python() -> String {
    std::env::var("FLASHCORE_PYTHON").unwrap_or_else(|_| "python3".to_owned())
}

/// The path of libnvrtc: `FLASHCORE_NVRTC`, else the first one under `.tools` of the working directory or of
/// a parent.
pub fn nvrtc() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("FLASHCORE_NVRTC") {
        return Some(PathBuf::from(named));
    }
    let here = std::env::current_dir().ok()?;
    here.ancestors().map(|dir| dir.join(".tools")).filter(|dir| dir.is_dir()).find_map(|dir| find_nvrtc(&dir))
}

fn find_nvrtc(folder: &Path) -> Option<PathBuf> {
    let mut open = vec![folder.to_path_buf()];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() && !path.is_symlink() {
                open.push(path);
            } else if entry.file_name().to_string_lossy().starts_with("libnvrtc.so") {
                return Some(path);
            }
        }
    }
    None
}

/// Folders of CUDA's headers: `FLASHCORE_CUDA_INCLUDE`, else beside libnvrtc (`…/lib/libnvrtc.so` and
/// `…/include`).
fn headers(library: &Path) -> Vec<PathBuf> {
    let named = std::env::var_os("FLASHCORE_CUDA_INCLUDE").map(PathBuf::from);
    let beside = || Some(library.parent()?.parent()?.join("include"));
    let include = named.or_else(beside).filter(|dir| dir.join("cuda_fp16.h").is_file());
    // The headers of the C++ standard library are in the subfolder `cccl`.
    let folders = include.into_iter().flat_map(|dir| [dir.join("cccl"), dir]);
    folders.filter(|dir| dir.is_dir()).collect()
}

/// The header that NVRTC did not find. The message says "could not open", from version 13 "cannot open".
fn missing_header(log: &str) -> Option<&str> {
    let (_, rest) = log.split_once(" open source file \"")?;
    rest.split_once('"').map(|(header, _)| header)
}

/// Compiles CUDA C++ to PTX for an architecture like `compute_80`.
///
/// # Errors
/// When NVRTC is not found or rejects the source.
pub fn compile_cuda(source: &str, arch: &str) -> Result<String, NvrtcError> {
    compile(source, Path::new("kernel.cu"), None, arch)
}

/// Like [`compile_cuda`] for the text of a file. Includes are searched in the file's folder.
///
/// # Errors
/// As for [`compile_cuda`]; the messages name the file.
pub fn compile_cuda_file(source: &str, file: &Path, arch: &str) -> Result<String, NvrtcError> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    compile(source, file, Some(folder), arch)
}

fn compile(source: &str, name: &Path, folder: Option<&Path>, arch: &str) -> Result<String, NvrtcError> {
    let library = nvrtc().ok_or(NvrtcError::NotFound)?;
    let python = python();
    let include = headers(&library);
    let start = |source| NvrtcError::Python { python: python.clone(), source };
    let mut child = Command::new(&python)
        .args(["-c", include_str!("nvrtc.py")])
        .arg(&library)
        .arg(arch)
        .arg(name)
        .args(folder)
        .args(&include)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(start)?;
    if let Some(mut input) = child.stdin.take() {
        // A child that ended early reports the reason on its standard error.
        let _ = input.write_all(source.as_bytes());
    }
    let output = child.wait_with_output().map_err(start)?;
    let log = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    match output.status.code() {
        Some(0) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        Some(1) => Err(match missing_header(&log) {
            // An include in quotes is the source's own header, not one of CUDA's.
            Some(header) if include.is_empty() && !source.contains(&format!("\"{header}\"")) => {
                NvrtcError::NoHeaders { header: header.to_owned() }
            }
            _ => NvrtcError::Source(log),
        }),
        _ => Err(NvrtcError::Load { library, reason: log }),
    }
}
