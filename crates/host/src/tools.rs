//! Finds Python and NVIDIA's NVRTC, which compiles CUDA C++. (`predict::resources::Ptxas` finds ptxas.)

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Why CUDA C++ could not be compiled.
#[derive(Debug, thiserror::Error)]
pub enum NvrtcError {
    #[error(
        "CUDA C++ needs NVRTC, which was not found: install it for `{python}` (`{python} -m pip install \
         nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl`; with uvx name these after \
         --with, separated by commas), or set FLASHCORE_NVRTC to libnvrtc.so; or compile to PTX elsewhere and \
         check the PTX",
        python = python()
    )]
    NotFound,
    /// The python3 process that loads NVRTC could not be started.
    #[error(
        "NVRTC is loaded by `{python}`, which does not start: {source}; set FLASHCORE_PYTHON to a \
    working Python 3"
    )]
    Python { python: String, source: std::io::Error },
    #[error(
        "{library}{} cannot be loaded: {reason}",
        if *named { ", which FLASHCORE_NVRTC names," } else { "" }
    )]
    Load {
        library: PathBuf,
        /// Whether FLASHCORE_NVRTC names the library.
        named: bool,
        reason: String,
    },
    /// The source includes CUDA headers that are not installed.
    #[error(
        "the source includes <{header}>, but there are no CUDA headers beside {library}: install them \
         (`{python} -m pip install {packages}`), or set FLASHCORE_CUDA_INCLUDE to the folder that holds {header}",
        library = library.display(),
        python = python(),
        packages = header_packages(library)
    )]
    NoHeaders { header: String, library: PathBuf },
    /// NVRTC rejects the source.
    #[error("NVRTC rejects the source:\n{0}")]
    Source(String),
}

/// The interpreter: `FLASHCORE_PYTHON`, else `python3` on PATH.
pub fn python() -> String {
    std::env::var("FLASHCORE_PYTHON").unwrap_or_else(|_| "python3".to_owned())
}

/// The path of libnvrtc: `FLASHCORE_NVRTC`, else the first one under `.tools` of the working directory or of
/// a parent, among the packages of [`python`], or in a CUDA toolkit.
pub fn nvrtc() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("FLASHCORE_NVRTC") {
        return Some(PathBuf::from(named));
    }
    let here = std::env::current_dir().unwrap_or_default();
    let fetched = here.ancestors().map(|dir| dir.join(".tools")).find_map(|dir| find_nvrtc(&dir));
    fetched.or_else(nvrtc_of_python).or_else(nvrtc_of_toolkit)
}

/// The library of the package `nvidia-cuda-nvrtc`.
fn nvrtc_of_python() -> Option<PathBuf> {
    let paths = "import sys; print(*filter(None, sys.path), sep='\\n')";
    let output = Command::new(python()).args(["-c", paths]).stderr(Stdio::null()).output().ok()?;
    let paths = String::from_utf8_lossy(&output.stdout).into_owned();
    paths.lines().find_map(|path| find_nvrtc(&Path::new(path).join("nvidia")))
}

/// The library of the toolkit in `CUDA_HOME`, `CUDA_PATH` or the usual folder.
fn nvrtc_of_toolkit() -> Option<PathBuf> {
    let named = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    named.chain([PathBuf::from("/usr/local/cuda")]).find_map(|toolkit| find_nvrtc(&toolkit.join("lib64")))
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

/// The packages with the headers for this NVRTC. Those of CUDA 12 have a suffix, those of CUDA 13 have none.
fn header_packages(library: &Path) -> &'static str {
    let name = library.file_name().unwrap_or_default().to_string_lossy();
    match name.ends_with(".so.12") {
        true => "nvidia-cuda-runtime-cu12 nvidia-cuda-cccl-cu12",
        false => "nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl",
    }
}

/// Folders of CUDA's headers: `FLASHCORE_CUDA_INCLUDE`, else those [beside](headers_beside) libnvrtc. Empty
/// without the headers of the runtime.
pub(crate) fn headers(library: &Path) -> Vec<PathBuf> {
    let named = std::env::var_os("FLASHCORE_CUDA_INCLUDE").map(PathBuf::from);
    let folders = named.map_or_else(|| headers_beside(library), |dir| vec![dir]);
    if !folders.iter().any(|dir| dir.join("cuda_fp16.h").is_file()) {
        return Vec::new();
    }
    // The headers of the C++ standard library are in the subfolder `cccl`, if not in a package of their own.
    let folders = folders.into_iter().flat_map(|dir| [dir.join("cccl"), dir]);
    folders.filter(|dir| dir.is_dir()).collect()
}

/// `…/include` for `…/lib/libnvrtc.so`, as in a toolkit and in the packages of CUDA 13. The packages of CUDA
/// 12 have a folder each: `nvidia/cuda_nvrtc/lib`, `nvidia/cuda_runtime/include`, `nvidia/cuda_cccl/include`.
fn headers_beside(library: &Path) -> Vec<PathBuf> {
    let home = library.parent().and_then(Path::parent);
    let packages = home.and_then(Path::parent);
    let of_packages = packages.into_iter().flat_map(|all| {
        ["cuda_runtime", "cuda_cccl", "cuda_nvcc"].map(|package| all.join(package).join("include"))
    });
    home.into_iter().map(|home| home.join("include")).chain(of_packages).collect()
}

/// The name of the header that NVRTC did not find. The message says "could not open", since version 13
/// "cannot open".
pub(crate) fn missing_header(log: &str) -> Option<&str> {
    let (_, rest) = log.split_once(" open source file \"")?;
    rest.split_once('"').map(|(header, _)| header)
}

/// Compiles CUDA C++ that contains only device code to PTX, for an architecture like `compute_80`.
///
/// # Errors
/// When NVRTC is not found or rejects the source.
pub fn compile_cuda(source: &str, arch: &str) -> Result<String, NvrtcError> {
    let library = nvrtc().ok_or(NvrtcError::NotFound)?;
    let include = headers(&library);
    let mut options = vec![format!("--gpu-architecture={arch}")];
    options.extend(["--std=c++17", "-default-device", "-lineinfo"].map(str::to_owned));
    options.extend(include.iter().map(|folder| format!("--include-path={}", folder.display())));
    let (source, name) = (source.to_owned(), "kernel.cu".to_owned());
    let request = Request { source, name, options, headers: BTreeMap::new(), expressions: Vec::new() };
    match request.compile(&library) {
        Ok(compiled) => Ok(compiled.ptx),
        Err(NvrtcError::Source(log)) => Err(match missing_header(&log) {
            Some(header) if include.is_empty() => {
                NvrtcError::NoHeaders { header: header.to_owned(), library }
            }
            _ => NvrtcError::Source(log),
        }),
        Err(error) => Err(error),
    }
}

/// One compilation by NVRTC.
pub(crate) struct Request {
    pub source: String,
    /// The name of the source in messages.
    pub name: String,
    pub options: Vec<String>,
    /// Texts of headers, by the name in `#include`.
    pub headers: BTreeMap<String, String>,
    /// Template instances to compile.
    pub expressions: Vec<String>,
}

/// The result of a compilation.
#[derive(Clone, Debug)]
pub struct Compiled {
    pub ptx: String,
    /// The name in the PTX of each template instance, by the instance as written.
    pub names: BTreeMap<String, String>,
}

impl Request {
    /// Runs NVRTC in a Python process.
    pub fn compile(&self, library: &Path) -> Result<Compiled, NvrtcError> {
        let python = python();
        let start = |source| NvrtcError::Python { python: python.clone(), source };
        let mut child = Command::new(&python)
            .args(["-c", include_str!("nvrtc.py")])
            .arg(library)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(start)?;
        let request = serde_json::json!({
            "source": self.source, "name": self.name, "options": self.options, "headers": self.headers,
            "expressions": self.expressions,
        });
        if let Some(mut input) = child.stdin.take() {
            // A write error is ignored: a child that ended early reports the reason on its standard error.
            let _ = input.write_all(request.to_string().as_bytes());
        }
        let output = child.wait_with_output().map_err(start)?;
        let log = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        let answer: Option<serde_json::Value> = serde_json::from_slice(&output.stdout).ok();
        match (output.status.code(), answer) {
            (Some(0), Some(answer)) => {
                let names = answer["names"].as_object().into_iter().flatten();
                let name = |(written, lowered): (&String, &serde_json::Value)| {
                    Some((written.clone(), lowered.as_str()?.to_owned()))
                };
                let ptx = answer["ptx"].as_str().unwrap_or_default().to_owned();
                Ok(Compiled { ptx, names: names.filter_map(name).collect() })
            }
            (Some(1), _) => Err(NvrtcError::Source(log)),
            _ => {
                let named = std::env::var_os("FLASHCORE_NVRTC").is_some();
                Err(NvrtcError::Load { library: library.to_path_buf(), named, reason: log })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Scratch;

    #[test]
    fn headers_are_found_in_both_layouts_of_the_packages() {
        let scratch = Scratch::new().unwrap();
        let make = |path: &str| {
            let path = scratch.path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
            path
        };
        let of_13 = make("13/nvidia/cu13/lib/libnvrtc.so.13");
        make("13/nvidia/cu13/include/cuda_fp16.h");
        make("13/nvidia/cu13/include/cccl/nv/target");
        let of_12 = make("12/nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
        make("12/nvidia/cuda_nvrtc/include/nvrtc.h");
        assert_eq!(headers(&of_12), Vec::<PathBuf>::new());
        let error =
            NvrtcError::NoHeaders { header: "cuda_fp16.h".into(), library: of_12.clone() }.to_string();
        assert!(error.contains("pip install nvidia-cuda-runtime-cu12 nvidia-cuda-cccl-cu12`"), "{error}");
        make("12/nvidia/cuda_runtime/include/cuda_fp16.h");
        make("12/nvidia/cuda_cccl/include/nv/target");
        let shown = |library: &Path| -> Vec<String> {
            let root = scratch.path("");
            let plain = |dir: PathBuf| dir.strip_prefix(&root).unwrap().display().to_string();
            headers(library).into_iter().map(plain).collect()
        };
        assert_eq!(shown(&of_13), ["13/nvidia/cu13/include/cccl", "13/nvidia/cu13/include"]);
        assert_eq!(
            shown(&of_12),
            ["12/nvidia/cuda_nvrtc/include", "12/nvidia/cuda_runtime/include", "12/nvidia/cuda_cccl/include"]
        );
    }
}
